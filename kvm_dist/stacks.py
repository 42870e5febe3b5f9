"""Where every thread of every rank is: one file per rank, written on request. Imports no torch.

faulthandler writes from the signal's own handler, in C: also in a rank that waits in a collective, that loops
for ever or that holds the interpreter's lock.
"""

import faulthandler
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvm_dist.heartbeat import Beat, process_state

REQUEST = signal.SIGUSR1
_FOLDER_MODE, _FILE_MODE = 0o750, 0o640
_POLL_SECONDS = 0.05
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_TRAINS = "trainer.py"  # the thread that runs the steps has it in its stack
_WAITS = (
    "torch/distributed/",
    "torch/cuda/streams.py",  # for the device, which waits for other ranks
    "deepspeed/",  # the same, in reading a norm
    "parallel/collectives.py",
    "parallel/sequence/exchange.py",
    "parallel/sequence/all_to_all.py",
)


class Stacks:
    """This rank's file. Empty until somebody asks."""

    def __init__(self, folder: Path, rank: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        try:
            folder.mkdir(_FOLDER_MODE, exist_ok=True)
            self._descriptor = os.open(stack_path(folder, rank), flags, _FILE_MODE)
        except OSError:
            self._descriptor = os.dup(2)  # into the log, then
        faulthandler.register(REQUEST, file=self._descriptor, all_threads=True)

    def dump(self) -> None:
        """Write them now, and to the disk: another host may be the one that reads them."""
        faulthandler.dump_traceback(self._descriptor, all_threads=True)
        with suppress(OSError):
            os.fsync(self._descriptor)

    def close(self) -> None:
        signal.signal(REQUEST, signal.SIG_IGN)  # before its file is gone: a late request must not kill
        faulthandler.unregister(REQUEST)
        os.close(self._descriptor)


def stack_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.txt"


def request_stacks(folder: Path, beats: Sequence[Beat], wait_seconds: float) -> list[Path]:
    """Ask the ranks of this host that have not written theirs; wait for all ranks' files. Those that came."""
    wanted = {beat.rank: stack_path(folder, beat.rank) for beat in beats}
    for beat in beats:
        if not _written(wanted[beat.rank]) and process_state(beat) == "running" and beat.pid != os.getpid():
            with suppress(OSError):
                os.kill(beat.pid, REQUEST)
    deadline = time.monotonic() + wait_seconds
    while not all(map(_written, wanted.values())) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return [path for path in wanted.values() if _written(path)]


def is_waiting(text: str) -> bool | None:
    """Whether the thread that trains waits for another rank; None if no such thread is in `text`."""
    for section in _THREAD.split(text)[1:]:
        frames = [line for line in section.splitlines() if line.startswith("  File ")]
        if any(_TRAINS in frame for frame in frames):
            return any(part in frames[0] for part in _WAITS)
    return None


def _written(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
