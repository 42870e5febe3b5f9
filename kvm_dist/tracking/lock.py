"""One tracking process a run: `tracking.lock` in its directory, which names its holder. Imports no mlflow."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO

from kvm_dist.run_lock import process_start, read_holder, this_process

LOCK_NAME = "tracking.lock"
GRACE_SECONDS = 2.0  # for a holder to see by itself that it is followed
_POLL_SECONDS = 0.2


@contextlib.contextmanager
def alone_in(
    run_dir: Path, patience_seconds: float, followed: Path | None, takes_over: bool
) -> Iterator[None]:
    """Hold the run's lock. Raises BlockingIOError if another process has it for `patience_seconds`.

    takes_over: the holder belongs to a trainer that is done, or done with it. It leaves as soon as it sees
    that, but one that stands back behind busy processes may see nothing for minutes: it is ended, which loses
    nothing, since what was sent is asked from the store. `followed`: the sqlite file that both write, if any.
    """
    path = run_dir / LOCK_NAME
    ended = False

    def wait(waited: float) -> None:
        nonlocal ended
        if takes_over and not ended and waited >= GRACE_SECONDS:
            ended = _end_holder(path, followed)

    with open(path, "a+", encoding="utf-8") as lock:
        _take(lock, patience_seconds, wait)
        lock.truncate(0)
        lock.write(json.dumps(asdict(this_process())))
        lock.flush()
        yield


@contextlib.contextmanager
def alone_at(database: Path | None, patience_seconds: float) -> Iterator[None]:
    """Several runs share one sqlite file, whose schema must be made by one process alone, and to its end.

    Raises BlockingIOError if another process makes it for `patience_seconds`.
    """
    if database is None:
        yield
        return
    with open(f"{database}.lock", "w", encoding="utf-8") as lock:
        _take(lock, patience_seconds)
        yield


def _take(
    lock: IO[str], patience_seconds: float, wait: Callable[[float], None] = lambda waited: None
) -> None:
    begun = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - begun
            if waited >= patience_seconds:
                raise
        wait(waited)
        time.sleep(_POLL_SECONDS)


def _end_holder(path: Path, database: Path | None) -> bool:
    """Kill the process that the lock names, unless it makes a schema just now. Whether that is settled."""
    holder = read_holder(path)
    if holder is None:
        return False  # it is just writing its name
    if holder.host != socket.gethostname():
        return True
    with contextlib.suppress(OSError), alone_at(database, 0.0):
        if process_start(holder.pid) == holder.process_start:
            os.kill(holder.pid, signal.SIGKILL)
        return True
    return False
