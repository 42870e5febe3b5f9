"""Files that survive a power cut: written, hashed and fsynced in one pass. Imports no torch."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from parallel.config import FrozenConfig


class FileEntry(FrozenConfig):
    """What the manifest knows of one file."""

    size: int
    sha256: str
    tensors: int = 0


def write_durably(path: Path, pieces: Iterable[bytes | memoryview], tensors: int = 0) -> FileEntry:
    """Creates `path` from `pieces`; returns its size and hash once the bytes are on the device."""
    digest = hashlib.sha256()
    size = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
    with open(descriptor, "wb", buffering=0) as file:
        for piece in pieces:
            rest = memoryview(piece).cast("B")
            digest.update(rest)
            size += len(rest)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    return FileEntry(size=size, sha256=digest.hexdigest(), tensors=tensors)


def sync_folder(path: Path) -> None:
    """Makes creations and renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
