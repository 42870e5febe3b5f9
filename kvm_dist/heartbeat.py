"""A sign of life per rank: one small file, overwritten at every phase of a step. Imports no torch."""

import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kvm_dist.run_lock import process_start

PHASES = ("start", "data", "forward", "backward", "reduce", "optimizer", "report", "evaluate", "save", "end")
AVERAGED_STEPS = 20  # of `own_seconds`
_RECORD_BYTES = 512  # every record has this length, so that one write replaces the one before
_FOLDER_MODE, _FILE_MODE = 0o750, 0o640


@dataclass(frozen=True)
class Beat:
    """Where a rank was when it last wrote.

    count: beats since the rank's start; all ranks beat at the same places: a lower count is further behind.
    step: the optimizer step worked on, from 1. time: Unix time. process_start: as in a lock's holder.
    own_seconds: data and forward of a step without waiting for others, mean over the last steps.
    """

    rank: int
    attempt: int
    count: int
    step: int
    phase: str
    time: float
    host: str
    pid: int
    process_start: int
    own_seconds: float = 0.0
    averaged_steps: int = 0


class Heartbeat:
    """Writes this rank's beats. A disk that refuses them costs the beats, never the run."""

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self._identity = {
            "rank": rank,
            "attempt": attempt,
            "host": socket.gethostname()[:64],
            "pid": os.getpid(),
            "process_start": process_start(os.getpid()) or 0,
        }
        self.rank, self.attempt = rank, attempt
        self.count, self.step, self.phase = 0, 0, "start"
        self.beaten = time.monotonic()
        self._step_own = 0.0
        self._own: deque[float] = deque(maxlen=AVERAGED_STEPS)
        self._waited = 0.0
        self.waited_seconds: Callable[[], float] = lambda: 0.0  # for other ranks, since the start
        self.metrics: Callable[[], dict[str, float]] = dict  # what the beats of all ranks say
        self.also: Callable[[str], None] = lambda phase: None  # told of a phase after its beat is written
        self._descriptor = _open(folder, rank)
        self._write()

    def begin_step(self, step: int) -> None:
        """From here on beats are of `step` (from 1), the first of which is the wait for its data."""
        self.step = step
        self.beat("data")

    def beat(self, phase: str) -> None:
        """Say that `phase` begins."""
        now = time.monotonic()
        waited = self.waited_seconds()
        if self.phase in ("data", "forward"):
            self._step_own += now - self.beaten - (waited - self._waited)
        self._waited = waited
        if phase == "optimizer":
            self._own.append(max(0.0, self._step_own))
            self._step_own = 0.0
        self.phase, self.beaten = phase, now
        self.count += 1
        self._write()
        self.also(phase)

    def close(self) -> None:
        """The last beat stays: it says where the rank was."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self) -> None:
        if self._descriptor is None:
            return
        record = {
            **self._identity,
            "count": self.count,
            "step": self.step,
            "phase": self.phase,
            "time": round(time.time(), 3),
            "own_seconds": sum(self._own) / len(self._own) if self._own else 0.0,
            "averaged_steps": len(self._own),
        }
        try:
            os.pwrite(self._descriptor, json.dumps(record).encode().ljust(_RECORD_BYTES - 1) + b"\n", 0)
        except OSError:
            self._descriptor = None


def beat_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}"


def read_beats(folder: Path, attempt: int | None = None) -> list[Beat]:
    """The last beat of every rank, by rank: of `attempt`, or of the newest one that any rank has."""
    beats = sorted(_readable(folder), key=lambda beat: beat.rank)
    if attempt is None:
        attempt = max((beat.attempt for beat in beats), default=0)
    return [beat for beat in beats if beat.attempt == attempt]


def process_state(beat: Beat) -> str:
    """Of a rank on this host: "running", "stopped" (as by SIGSTOP) or "gone"; "" for one elsewhere."""
    if beat.host != socket.gethostname()[:64]:
        return ""
    if process_start(beat.pid) != beat.process_start:
        return "gone"
    try:
        state = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "running"
    return "stopped" if state in "Tt" else "running"


def as_record(beat: Beat) -> dict[str, object]:
    """For people and JSON: without what only programs compare."""
    return {key: value for key, value in asdict(beat).items() if key not in ("process_start", "count")}


def _open(folder: Path, rank: int) -> int | None:
    try:
        folder.mkdir(_FOLDER_MODE, exist_ok=True)
        return os.open(beat_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _FILE_MODE)
    except OSError:
        return None


def _readable(folder: Path) -> Iterator[Beat]:
    try:
        paths = list(folder.iterdir())
    except OSError:
        return
    names = {field.name for field in fields(Beat)}
    for path in paths:
        try:
            record = json.loads(path.read_bytes())
            yield Beat(**{key: value for key, value in record.items() if key in names})
        except (OSError, ValueError, TypeError, AttributeError):
            continue  # just being written, or no beat at all
