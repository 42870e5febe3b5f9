"""Ranks that are slower than the others, found in everybody's beats. Imports no torch.

A step is as fast as its slowest rank, so steps take as long on all. What differs is a rank's own time: data
and forward without waiting for others. On a GPU that is the time of the host, not of the device.
"""

import logging
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvm_dist.heartbeat import AVERAGED_STEPS, Beat, read_beats

FACTOR = 1.5
LOOK_SECONDS = 10.0
_NOISE_SECONDS = 0.01  # a difference that nobody would look for
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Slowest:
    """The slowest rank. ratio: of its own seconds a step to the median of the others."""

    rank: int
    host: str
    own_seconds: float
    median_seconds: float

    @property
    def ratio(self) -> float:
        return self.own_seconds / self.median_seconds if self.median_seconds else 1.0

    @property
    def is_straggler(self) -> bool:
        return self.ratio >= FACTOR and self.own_seconds - self.median_seconds >= _NOISE_SECONDS


def slowest_rank(beats: Sequence[Beat], ranks: int) -> Slowest | None:
    """None until all ranks have taken enough steps to be compared."""
    if len(beats) < max(2, ranks) or any(beat.averaged_steps < AVERAGED_STEPS for beat in beats):
        return None
    slowest = max(beats, key=lambda beat: beat.own_seconds)
    others = [beat.own_seconds for beat in beats if beat.rank != slowest.rank]
    return Slowest(slowest.rank, slowest.host, slowest.own_seconds, statistics.median(others))


class Stragglers:
    """Rank 0's thread that compares the ranks now and then, away from the steps."""

    def __init__(self, folder: Path, attempt: int, ranks: int, look_seconds: float = LOOK_SECONDS) -> None:
        self._folder, self._attempt, self._ranks = folder, attempt, ranks
        self._look_seconds = look_seconds
        self._slowest: Slowest | None = None
        self._named: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stragglers", daemon=True)
        self._thread.start()

    def metrics(self) -> dict[str, float]:
        """Of the last look; nothing before the first."""
        slowest = self._slowest
        if slowest is None:
            return {}
        return {"perf/slowest_rank": float(slowest.rank), "perf/slowest_rank_ratio": slowest.ratio}

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Compare now; say once whom the others wait for, and once that they do no longer."""
        slowest = self._slowest = slowest_rank(read_beats(self._folder, self._attempt), self._ranks)
        if slowest is None:
            return
        if slowest.is_straggler and slowest.rank != self._named:
            self._named = slowest.rank
            _log.warning("%s", straggler_message(slowest))
        elif not slowest.is_straggler and self._named is not None:
            _log.warning("rank %d is no longer slower than the others", self._named)
            self._named = None

    def _watch(self) -> None:
        while not self._ended.wait(self._look_seconds):
            self.look()


def straggler_message(slowest: Slowest) -> str:
    return (
        f"rank {slowest.rank} on {slowest.host} is slow: {slowest.ratio:.1f} x the median of the others in "
        f"data and forward ({slowest.own_seconds:.3f} s a step against {slowest.median_seconds:.3f} s, over "
        f"{AVERAGED_STEPS} steps)"
    )
