"""The share of one rank in a save: its pieces of the tensors, each at its place in the files of all ranks."""

import errno
import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from kvm_dist.checkpoint.layout import FileLayout

_WRITE_BYTES = 16 << 20
_WRITE_THREADS = 4
_LONGEST_UNSEEN = 30.0  # seconds until the folder that rank 0 made must be seen here, too
_POLL_SECONDS = 0.05
# A share's marker is renamed as the share gets on: that needs no space, and no message between ranks.
OPEN, WRITTEN, SYNCED, FAILED = "open", "written", "synced", "failed"
Entry = tuple[int, Tensor]  # byte offset in a file, elements


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of the tensor `key`, from element `start` of the flattened whole on."""

    key: str
    start: int
    elements: Tensor


@dataclass(frozen=True)
class Range:
    """Bytes of a file that one rank wrote, with their CRC."""

    offset: int
    size: int
    crc: int


def create_files(folder: Path, layouts: Sequence[FileLayout]) -> None:
    """Every file at its full size, without content."""
    for layout in layouts:
        descriptor = os.open(folder / layout.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        try:
            os.truncate(descriptor, layout.size)
        finally:
            os.close(descriptor)


def write_share(folder: Path, layouts: Sequence[FileLayout], pieces: Iterable[Piece], rank: int) -> None:
    """Writes this rank's pieces (rank 0 the headers, too) and tells of it through its marker in `folder`.

    An error is told through the marker, too; rank 0 decides what becomes of the save. What is no OSError is
    raised as well.
    """
    try:
        with open(_new_marker(folder, rank), "w") as marker:
            _write_files(folder, _by_file(layouts, pieces, headers=rank == 0), rank, marker)
        _rename_marker(folder, rank, WRITTEN, SYNCED)
    except OSError as error:
        _tell_of_failure(folder, rank, error)
    except BaseException:
        _tell_of_failure(folder, rank, OSError())
        raise


def _write_files(folder: Path, by_file: Mapping[str, list[Entry]], rank: int, marker: TextIO) -> None:
    """Several at a time; each is synced as soon as it is written. The share is written when all are."""
    with ExitStack() as opened, ThreadPoolExecutor(_WRITE_THREADS) as pool:
        writes: dict[Future[list[tuple[int, int, int]]], str] = {}
        files: dict[str, int] = {}
        for name, entries in by_file.items():
            files[name] = os.open(folder / name, os.O_WRONLY)
            opened.callback(os.close, files[name])
            writes[pool.submit(_write, files[name], entries)] = name
        syncs = [pool.submit(os.fsync, files[writes[write]]) for write in as_completed(writes)]
        json.dump({name: write.result() for write, name in writes.items()}, marker)
        marker.flush()
        _rename_marker(folder, rank, OPEN, WRITTEN)
        for sync in syncs:
            sync.result()


def _new_marker(folder: Path, rank: int) -> int:
    """Its descriptor. A network file system may show what another node has made a little later."""
    deadline = time.monotonic() + _LONGEST_UNSEEN
    while True:
        try:
            return os.open(marker_path(folder, rank, OPEN), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def marker_path(folder: Path, rank: int, state: str) -> Path:
    return folder / f"rank-{rank:05d}.{state}"


def read_share(folder: Path, rank: int) -> dict[str, list[Range]]:
    """What a rank says it wrote: file -> ranges. Its share must be written."""
    for state in (WRITTEN, SYNCED):
        try:
            told = json.loads(marker_path(folder, rank, state).read_text())
        except FileNotFoundError:
            continue  # renamed meanwhile
        return {name: [Range(*fields) for fields in ranges] for name, ranges in told.items()}
    raise OSError(f"rank {rank} took back that it had written its part")


def _by_file(layouts: Sequence[FileLayout], pieces: Iterable[Piece], headers: bool) -> dict[str, list[Entry]]:
    """File name -> (byte offset, elements), in the order of the file."""
    places = {key: (layout.name, offset) for layout in layouts for key, offset in layout.offsets.items()}
    found: dict[str, list[Entry]] = {}
    if headers:
        for layout in layouts:
            found[layout.name] = [(0, torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))]
    for piece in pieces:
        name, offset = places[piece.key]
        offset += piece.start * piece.elements.element_size()
        found.setdefault(name, []).append((offset, piece.elements))
    for entries in found.values():
        entries.sort(key=lambda entry: entry[0])
    return found


def _write(descriptor: int, entries: list[Entry]) -> list[tuple[int, int, int]]:
    return [
        (offset, *_write_tensor(descriptor, offset, tensor)) for offset, tensor in entries if tensor.numel()
    ]


def _write_tensor(descriptor: int, offset: int, tensor: Tensor) -> tuple[int, int]:
    """The number of bytes written and their CRC."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    crc = 0
    for chunk in _chunks(raw):
        crc = zlib.crc32(chunk, crc)
        while chunk:
            written = os.pwrite(descriptor, chunk, offset)
            offset += written
            chunk = chunk[written:]
    return len(raw), crc


def _chunks(raw: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(raw), _WRITE_BYTES):
        yield raw[start : start + _WRITE_BYTES]


def _rename_marker(folder: Path, rank: int, old: str, new: str) -> None:
    os.rename(marker_path(folder, rank, old), marker_path(folder, rank, new))


def _tell_of_failure(folder: Path, rank: int, error: OSError) -> None:
    """The error's number is part of the marker's name: a full disk has no room for text."""
    failed = f"{FAILED}-{error.errno or errno.EIO}"
    for state in (OPEN, WRITTEN):
        try:
            _rename_marker(folder, rank, state, failed)
            return
        except OSError:
            continue
    try:
        marker_path(folder, rank, failed).touch()
    except OSError:
        return  # the folder is gone: rank 0 has given this save up already
