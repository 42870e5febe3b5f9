"""Where documents come from: files, folders, JSON lines and token arrays, cut into pieces. No torch."""

import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np
import zstandard

from kvm_dist.exit_codes import ConfigError, DataError

PYTHON_STDLIB = "python-stdlib"
TEXT_PIECE_BYTES = 16 << 20  # a longer plain file becomes several documents, cut at line ends
LINES_PIECE_BYTES = 32 << 20
LONGEST_CUT_LINE = 1 << 20  # a plain line above this may be cut inside
SINGLE_FILE_PIECES = 64  # so that a part of a lone text file can be held out

Kind = Literal["text", "lines", "lines.gz", "lines.zst", "tokens"]
_SUFFIX_KINDS: dict[str, Kind] = {
    ".jsonl": "lines",
    ".jsonl.gz": "lines.gz",
    ".jsonl.zst": "lines.zst",
    ".npy": "tokens",
}


@dataclass(frozen=True)
class Piece:
    """The lines of a file that start in `[start, end)`; a compressed or token file is one piece."""

    path: Path
    kind: Kind
    start: int
    end: int
    file_bytes: int
    modified_ns: int

    @property
    def fingerprint(self) -> list[str | int]:
        return [str(self.path), self.kind, self.start, self.end, self.file_bytes, self.modified_ns]

    @property
    def work_bytes(self) -> int:
        """Bytes of text to tokenise, compressed files taken to expand fourfold."""
        return (self.end - self.start) * (4 if self.kind in ("lines.gz", "lines.zst") else 1)


@dataclass(frozen=True)
class Document:
    """A text to tokenise, or the bytes of a text that is tokenised already."""

    content: bytes
    tokens: np.ndarray | None = None


def find_pieces(source: str) -> list[Piece]:
    """Everything to tokenise under `source`, in an order that depends on the names alone.

    Raises ConfigError if the source does not exist, DataError if it holds nothing.
    """
    files = _source_files(source)
    lone_file = len(files) == 1 and files[0] == Path(source)
    pieces = [piece for path in files for piece in _pieces_of(path, lone_file)]
    if not pieces:
        raise DataError(f"{source}: no text found; wanted a text file, a folder of them, or .jsonl[.gz|.zst]")
    return pieces


def _source_files(source: str) -> list[Path]:
    if source == PYTHON_STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return [path for path in _walk(root) if path.suffix == ".py"]
    path = Path(source)
    if path.is_dir():
        return list(_walk(path))
    if path.is_file():
        return [path]
    raise ConfigError(
        f"source {source!r} does not exist; give a file, a folder, or the word {PYTHON_STDLIB} "
        "for the sources of Python's own standard library"
    )


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in ("__pycache__", "site-packages", "dist-packages")
        )
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _pieces_of(path: Path, lone_file: bool) -> Iterator[Piece]:
    status = path.stat()
    size = status.st_size
    suffixes = "".join(path.suffixes[-2:]).lower()
    kind = _SUFFIX_KINDS.get(suffixes) or _SUFFIX_KINDS.get(path.suffix.lower(), "text")
    step = size
    if kind == "lines":
        step = LINES_PIECE_BYTES
    elif kind == "text":
        step = TEXT_PIECE_BYTES
        if lone_file:
            step = min(step, max(1024, size // SINGLE_FILE_PIECES))
    for start in range(0, size, step):
        yield Piece(path, kind, start, min(start + step, size), size, status.st_mtime_ns)


def read_documents(piece: Piece) -> Iterator[Document]:
    """The documents of a piece, empty ones left out.

    Raises DataError, naming file and line, for what is not text, not JSON with a "text" string, or damaged.
    """
    if piece.kind == "text":
        yield from _read_text(piece)
    elif piece.kind == "tokens":
        yield from _read_tokens(piece)
    else:
        yield from _read_lines(piece)


def _line_start(file: IO[bytes], offset: int, limit: int = -1) -> int:
    """The first line start at or after `offset`."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    file.readline(limit)
    return file.tell()


def _read_text(piece: Piece) -> Iterator[Document]:
    with piece.path.open("rb") as file:
        end = _line_start(file, piece.end, LONGEST_CUT_LINE) if piece.end < piece.file_bytes else piece.end
        start = _line_start(file, piece.start, LONGEST_CUT_LINE)
        file.seek(start)
        content = file.read(max(0, end - start))
    if content and b"\0" not in content:
        yield Document(content)


def _read_tokens(piece: Piece) -> Iterator[Document]:
    try:
        tokens = np.load(piece.path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{piece.path}: not a readable .npy array of token ids: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(
            f"{piece.path}: holds {tokens.dtype} of shape {tokens.shape}; wanted integers of shape (tokens,)"
        )
    if tokens.size:
        yield Document(tokens.astype("<i8").tobytes(), tokens)


def _read_lines(piece: Piece) -> Iterator[Document]:
    lines_before = 0
    with piece.path.open("rb") as file:
        if piece.kind == "lines":
            lines: Iterable[bytes] = _lines_between(file, piece.start, piece.end)
        elif piece.kind == "lines.gz":
            lines = _gzip_lines(piece.path, file)
        else:
            lines = _zstd_lines(piece.path, file)
        for index, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                yield from _document_of_line(line)
            except ValueError as error:
                if piece.start:
                    lines_before = _count_lines(piece.path, piece.start)
                where = f"{piece.path}:{lines_before + index + 1}"
                raise DataError(f'{where}: {error}; wanted an object such as {{"text": "..."}}') from error


def _document_of_line(line: bytes) -> Iterator[Document]:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"got a JSON {type(record).__name__}")
    if "text" not in record:
        raise ValueError(f'no key "text" among {sorted(record)[:8]}')
    if not isinstance(record["text"], str):
        raise ValueError(f'"text" is a {type(record["text"]).__name__}')
    if record["text"]:
        yield Document(record["text"].encode("utf-8", "replace"))


def _lines_between(file: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    position = _line_start(file, start)
    while position < end and (line := file.readline()):
        position += len(line)
        yield line


def _count_lines(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        stop = _line_start(file, offset)
        file.seek(0)
        count = 0
        while stop > 0 and (block := file.read(min(stop, 1 << 20))):
            count += block.count(b"\n")
            stop -= len(block)
    return count


def _gzip_lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    try:
        yield from gzip.GzipFile(fileobj=file)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: damaged or truncated gzip: {error}") from error


def _zstd_lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """Lines of a zstd file of any number of frames. The library's reader takes a cut file for a whole one."""
    pending = b""
    try:
        for block in _zstd_blocks(file):
            *whole, pending = (pending + block).split(b"\n")
            yield from whole
    except (EOFError, zstandard.ZstdError) as error:
        raise DataError(f"{path}: damaged or truncated zstd: {error}") from error
    if pending:
        yield pending


def _zstd_blocks(file: IO[bytes]) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    while block := file.read(1 << 20):
        while block:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(block)
            block = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("the file ends inside a frame")
