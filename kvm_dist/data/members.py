"""The format of a shard: which members a tar may hold and how their arrays are read. No torch, no pickle.

A sample is two adjacent members, `KEY.tokens.npy` (the tokens of consecutive whole documents, [tokens])
and `KEY.lengths.npy` (the tokens of each document, [documents] uint32). Many short documents share a sample:
a tar member costs a kilobyte and 30 microseconds, which a document of 200 tokens is not worth.
"""

import io
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

EXTENSIONS = ("tokens.npy", "lengths.npy")
MEMBER_NAME = re.compile(r"^([0-9]{5,12}-[0-9]{7,12})\.(tokens\.npy|lengths\.npy)$")
LARGEST_MEMBER_BYTES = 4 << 30
LENGTH_DTYPE = np.dtype("<u4")
_TOKEN_DTYPES = ("|u1", "<u2", "<u4")


class BadShard(ValueError):
    """What is wrong with a shard, and the first sample that is."""

    def __init__(self, problem: str, sample: int, key: str | None = None) -> None:
        self.problem, self.sample, self.key = problem, sample, key
        super().__init__(f"sample {sample}{f' (key {key})' if key else ''}: {problem}")


@dataclass(frozen=True)
class Sample:
    """Whole documents one after the other: `tokens` [tokens], `lengths` [documents]."""

    key: str
    tokens: np.ndarray
    lengths: np.ndarray

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.lengths.tobytes(), zlib.crc32(self.tokens.tobytes()))


def scan_samples(data: bytes) -> Iterator[tuple[str, dict[str, memoryview]]]:
    """Key and members of every sample of an uncompressed tar, in order.

    Raises BadShard at the first member that is no plain file, not allow-listed, too large, repeated, or not
    adjacent to the rest of its sample, and at a sample that lacks a member.
    """
    infos, fault = _headers(data)
    seen: set[str] = set()
    key, members = "", dict[str, memoryview]()
    for info in infos:
        matched = MEMBER_NAME.match(info.name)
        allowed = matched is not None and info.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
        next_key, extension = (matched[1], matched[2]) if matched else ("", "")
        if key and next_key != key:
            yield key, _complete(key, members, len(seen) - 1)
            members = {}
        if not allowed:
            raise BadShard(f"member {info.name[:80]!r} is not allowed in a shard", len(seen))
        if next_key != key and next_key in seen:
            raise BadShard("its members are not adjacent, or its key appears twice", len(seen), next_key)
        seen.add(next_key)
        key = next_key
        if extension in members:
            raise BadShard(f"member {info.name!r} appears twice", len(seen) - 1, key)
        if info.size > LARGEST_MEMBER_BYTES or info.offset_data + info.size > len(data):
            raise BadShard(f"the file ends inside member {info.name!r}", len(seen) - 1, key)
        members[extension] = memoryview(data)[info.offset_data : info.offset_data + info.size]
    if key and (len(members) == len(EXTENSIONS) or not fault):
        yield key, _complete(key, members, len(seen) - 1)
    if fault:
        raise BadShard(f"the tar is damaged: {fault}", len(seen) - (0 < len(members) < len(EXTENSIONS)))


def _headers(data: bytes) -> tuple[list[tarfile.TarInfo], str]:
    """Every readable header, and what made reading stop before the end of the archive."""
    infos: list[tarfile.TarInfo] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            infos.extend(archive)
    except (tarfile.TarError, EOFError, OSError) as error:
        return infos, str(error) or "unreadable"
    return infos, ""


def _complete(key: str, members: dict[str, memoryview], sample: int) -> dict[str, memoryview]:
    for extension in EXTENSIONS:
        if extension not in members:
            raise BadShard(
                f"member {key}.{extension} is missing, or not adjacent to the rest of its sample", sample, key
            )
    return members


def read_sample(key: str, members: dict[str, bytes] | dict[str, memoryview], sample: int) -> Sample:
    """The arrays of a sample. Raises BadShard unless they agree with each other."""
    try:
        tokens = _read_array(members["tokens.npy"])
        lengths = _read_array(members["lengths.npy"])
    except (KeyError, ValueError, EOFError) as error:
        raise BadShard(f"not a token array: {error}", sample, key) from error
    if lengths.dtype != LENGTH_DTYPE or int(lengths.sum(dtype=np.int64)) != tokens.size:
        raise BadShard("document lengths do not add up to the tokens", sample, key)
    return Sample(key, tokens, lengths)


def _read_array(data: bytes | memoryview) -> np.ndarray:
    """A one-dimensional array of unsigned integers out of .npy bytes, without copying them."""
    head = io.BytesIO(bytes(data[:256]))
    if np.lib.format.read_magic(head) != (1, 0):
        raise ValueError("unknown .npy version")
    shape, _, dtype = np.lib.format.read_array_header_1_0(head)
    if dtype.str not in _TOKEN_DTYPES:
        raise ValueError(f"dtype {dtype.str} is not one of {', '.join(_TOKEN_DTYPES)}")
    payload = memoryview(data)[head.tell() :]
    if len(shape) != 1 or shape[0] * dtype.itemsize != len(payload):
        raise ValueError(f"shape {shape} does not fit {len(payload)} bytes")
    return np.frombuffer(payload, dtype)
