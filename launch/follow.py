"""`kvm-dist logs`: what the ranks said, and what they go on to say. Imports no torch."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from kvm_dist.attempts import current_attempt
from kvm_dist.exit_codes import ConfigError
from kvm_dist.run_directory import RunDirectory
from launch.status_queue import queued_jobs
from launch.status_run import RunStatus, find_run, read_status

POLL_SECONDS = 0.2
_STATE_SECONDS = 2.0  # between looks at the run's state, which may ask Slurm
_TAIL_LINES = 10  # of each log, when a follow begins
_TAIL_BYTES = 16384
_LOG = re.compile(r"rank-(\d+)\.log")


def show_logs(run: Path, run_root: Path, rank: int | None, follow: bool) -> None:
    """Print a run's logs, all ranks' or one's; `follow` goes on until the run has ended."""
    directory = RunDirectory(find_run(run, run_root))
    if follow:
        Follower(directory, rank, lambda: read_status(directory.path, queued_jobs())).run()
        return
    logs = rank_logs(directory, rank)
    if not logs:
        raise ConfigError(f"{directory.logs}: no log{'' if rank is None else f' of rank {rank}'} yet")
    for number, path in logs.items():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            print(line if rank is not None else labelled(number, line))


def rank_logs(directory: RunDirectory, rank: int | None = None) -> dict[int, Path]:
    """The logs there are, by rank: of all ranks, or of one."""
    try:
        names = sorted(path.name for path in directory.logs.iterdir())
    except OSError:
        return {}
    matches = [match for name in names if (match := _LOG.fullmatch(name))]
    found = {int(match[1]): directory.logs / match[0] for match in matches}
    return {number: path for number, path in found.items() if rank in (None, number)}


def labelled(rank: int, line: str) -> str:
    return f"{rank:>3} | {line}"


class Follower:
    """Prints lines as they are written, through new attempts and replaced files, until the run is over."""

    def __init__(
        self,
        directory: RunDirectory,
        rank: int | None,
        status: Callable[[], RunStatus],
        write: Callable[[str], object] = sys.stdout.write,
    ) -> None:
        self._directory, self._rank, self._status, self._write = directory, rank, status, write
        self._tails: dict[int, Tail] = {}
        self._attempt = 0

    def run(self) -> None:
        looked = float("-inf")
        while True:
            status = None
            if time.monotonic() - looked >= _STATE_SECONDS:
                status, looked = self._status(), time.monotonic()
            said = self.print_new()
            if status is not None and not status.live and not said:
                error = f": {status.error}" if status.error else ""
                self._say(f"{status.name} {status.state} at step {status.step}{error}")
                return
            time.sleep(POLL_SECONDS)

    def print_new(self) -> bool:
        """Print what was added since the last call; whether there was anything."""
        attempt = current_attempt(self._directory.path)
        if attempt != self._attempt:
            self._attempt = attempt
            self._say(f"attempt {attempt}")
        said = False
        for number, path in rank_logs(self._directory, self._rank).items():
            first_look = number not in self._tails
            tail = self._tails.setdefault(number, Tail(path))
            lines = list(tail.lines())
            for line in lines[-_TAIL_LINES:] if first_look else lines:
                self._write((line if self._rank is not None else labelled(number, line)) + "\n")
                said = True
        sys.stdout.flush()
        return said

    def _say(self, text: str) -> None:
        self._write(f"--- {text}\n")


class Tail:
    """The finished lines of a growing file from near its end on; begins anew when the file is replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._open = b""
        self._begun = False

    def lines(self) -> Iterator[str]:
        """What was added since the last call, to the end of the old file where a new one has its name."""
        if self._file is not None:
            yield from self._read(self._file)
        if self._file is None or self._is_replaced(self._file):
            yield from self._reopen()

    def _reopen(self) -> Iterator[str]:
        try:
            file = self._path.open("rb")
        except OSError:
            return
        if self._file is not None:
            self._file.close()
        self._file, self._open = file, b""
        size = os.fstat(file.fileno()).st_size
        if not self._begun and size > _TAIL_BYTES:
            file.seek(size - _TAIL_BYTES)
            file.readline()  # the line that the cut went through
        self._begun = True
        yield from self._read(file)

    def _read(self, file: BinaryIO) -> Iterator[str]:
        *lines, self._open = (self._open + file.read()).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")

    def _is_replaced(self, file: BinaryIO) -> bool:
        try:
            now = os.stat(self._path)
        except OSError:
            return False
        return now.st_ino != os.fstat(file.fileno()).st_ino or now.st_size < file.tell()
