"""The launcher's look at the ranks' beats, for when no rank can raise its voice. Imports no torch."""

import time

from kvm_dist.attempts import current_attempt
from kvm_dist.hang import Hang, declare_hang
from kvm_dist.heartbeat import read_beats
from kvm_dist.run_directory import RunDirectory

LOOK_SECONDS = 1.0
MARGIN_SECONDS = 2.5  # the ranks' own watchdogs come first
_STEP_PHASES = {"data", "forward", "backward", "reduce", "optimizer", "report"}


class Silence:
    """Whether all ranks of the run have been silent in a step for longer than their watchdogs would bear.

    So it is when the only rank is stopped, or when code that holds the interpreter's lock loops in each.
    """

    def __init__(self, directory: RunDirectory, ranks: int, timeout_seconds: float) -> None:
        self.hang: Hang | None = None
        self._directory, self._ranks = directory, ranks
        self._patience = timeout_seconds + MARGIN_SECONDS
        self._attempt = current_attempt(directory.path)
        self._looked = self._excused = time.time()

    def found(self) -> bool:
        """Looks every now and then; once true, `hang` says who."""
        now = time.time()
        if now - self._looked < LOOK_SECONDS:
            return False
        if now - self._looked > LOOK_SECONDS + self._patience / 4:
            self._excused = now  # this process was stopped, and the ranks with it, maybe
        self._looked = now
        beats = read_beats(self._directory.heartbeats, self._attempt)
        newest = max((beat.time for beat in beats), default=now)
        in_a_step = len(beats) == self._ranks and all(beat.phase in _STEP_PHASES for beat in beats)
        if not in_a_step or now - max(newest, self._excused) < self._patience:
            return False
        self.hang = declare_hang(self._directory, self._attempt, self._ranks)
        return True
