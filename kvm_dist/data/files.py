"""Files that appear whole or not at all. No torch."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path, scratch: Path) -> Iterator[IO[bytes]]:
    """Write `path` under a temporary name in `scratch` (same file system), then sync and rename it."""
    temporary = scratch / f"{path.name}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, wait: bool) -> Iterator[None]:
    """Hold the lock file `path`. The kernel releases it however the process ends.

    Raises BlockingIOError if another process holds it and `wait` is false.
    """
    with path.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
