"""Notices in every rank that the run stands still, and ends it. Imports no torch."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvm_dist.exit_codes import ExitCode
from kvm_dist.hang import declare_hang, read_hang
from kvm_dist.heartbeat import Heartbeat
from kvm_dist.postmortem import record_end
from kvm_dist.run_directory import RunDirectory
from kvm_dist.stacks import Stacks
from kvm_dist.stragglers import Stragglers

_PEERS_SECONDS = 3.0  # until a rank that has not found the hang itself ends, too
_POLL_SECONDS = 0.25
_LONG_PHASES = {"start": 10.0, "evaluate": 10.0, "save": 10.0, "end": float("inf")}  # x the patience


def longest(phase: str, ranks: int) -> float:
    """How often the timeout fits into a phase.

    A start, an evaluation and a save may take ten times as long: meanwhile the others wait in collectives,
    which have a timeout of their own, but for NCCL's while it connects ranks. A rank that starts alone may
    prepare data for hours.
    """
    return float("inf") if phase == "start" and ranks == 1 else _LONG_PHASES.get(phase, 1.0)


class Watchdog:
    """A thread that looks at this rank's beats and, once they are late, at everybody's.

    timeout_seconds: the longest phase of a step.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        directory: RunDirectory,
        ranks: int,
        timeout_seconds: float,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self._heartbeat = heartbeat
        self._directory = directory
        self._ranks, self._timeout, self._end = ranks, timeout_seconds, end
        self._ended = threading.Event()
        self._excused = time.monotonic()
        self._stacks = Stacks(directory.stacks, heartbeat.rank)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._stacks.close()

    def _watch(self) -> None:
        while not self._ended.is_set():
            late, patience = self._late(), self._patience()
            if late >= patience:
                self._hang()
            elif (
                late >= self._timeout / 2
                and read_hang(self._directory.stacks, self._heartbeat.attempt) is not None
            ):
                self._follow()
            self._pause(late, patience)

    def _pause(self, late: float, patience: float) -> None:
        """Until something may have to be done. A process that was stopped meanwhile is not late."""
        if late >= self._timeout / 2:
            pause = _POLL_SECONDS if late >= patience / 2 else 1.0
        else:
            pause = min(max(self._timeout / 2 - late, _POLL_SECONDS), 5.0)
        begun = time.monotonic()
        self._ended.wait(pause)
        if time.monotonic() - begun > pause + self._timeout / 4 + 1:
            self._excused = time.monotonic()

    def _late(self) -> float:
        return time.monotonic() - max(self._heartbeat.beaten, self._excused)

    def _patience(self) -> float:
        return self._timeout * longest(self._heartbeat.phase, self._ranks)

    def _hang(self) -> None:
        self._stacks.dump()
        hang = declare_hang(self._directory, self._heartbeat.attempt, self._ranks)
        rank = self._heartbeat.rank
        print(f"kvm-dist: rank {rank}: {hang.cause}", file=sys.stderr, flush=True)
        record_end(self._directory, int(ExitCode.HANG), hang.cause, rank=rank, ranks=self._ranks)
        self._end(int(ExitCode.HANG))

    def _follow(self) -> None:
        """Another rank has found the hang: leave word where this one is, and give it time to say so."""
        self._stacks.dump()
        self._ended.wait(_PEERS_SECONDS)
        if not self._ended.is_set():
            self._end(int(ExitCode.HANG))


@contextmanager
def watched(
    directory: RunDirectory, rank: int, ranks: int, attempt: int, timeout_seconds: float
) -> Iterator[Heartbeat]:
    """This rank's heartbeat, and a watchdog over it; rank 0 also looks for stragglers."""
    heartbeat = Heartbeat(directory.heartbeats, rank, attempt)
    watchdog = Watchdog(heartbeat, directory, ranks, timeout_seconds)
    stragglers = Stragglers(directory.heartbeats, attempt, ranks) if rank == 0 and ranks > 1 else None
    if stragglers is not None:
        heartbeat.metrics = stragglers.metrics
    try:
        yield heartbeat
    finally:
        if stragglers is not None:
            stragglers.close()
        watchdog.close()
        heartbeat.close()
