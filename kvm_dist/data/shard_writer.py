"""Documents to shards: whole documents, grouped into samples, grouped into tar files. No torch."""

import hashlib
import io
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from kvm_dist.data.files import replacing
from kvm_dist.data.members import LENGTH_DTYPE, Sample

Split = Literal["train", "validation"]
SAMPLE_TOKENS = 1 << 16


@dataclass
class WrittenShard:
    """What the index needs to know of a shard; `checksums` and `sample_documents` have an entry a sample."""

    name: str
    split: Split
    bytes: int
    sha256: str
    tokens: int
    lengths: list[int]
    sample_documents: list[int]
    checksums: list[int]

    @property
    def summary(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "split": self.split,
            "samples": len(self.checksums),
            "documents": len(self.lengths),
            "tokens": self.tokens,
            "bytes": self.bytes,
            "sha256": self.sha256,
        }


@dataclass
class ShardWriter:
    """Writes the documents of one unit and one split to `SPLIT-UUUUU-KKK.tar`, each at most `shard_tokens`
    long unless a single document is longer."""

    folder: Path
    scratch: Path
    split: Split
    unit: int
    shard_tokens: int
    dtype: np.dtype[Any]
    shards: list[WrittenShard] = field(default_factory=list)
    _documents: list[np.ndarray] = field(default_factory=list)
    _tokens: int = 0

    def add(self, tokens: np.ndarray) -> None:
        if self._tokens and self._tokens + tokens.size > self.shard_tokens:
            self.close()
        self._documents.append(tokens)
        self._tokens += tokens.size

    def close(self) -> None:
        """Write what is pending."""
        if not self._documents:
            return
        name = f"{self.split}-{self.unit:05d}-{len(self.shards):03d}.tar"
        samples = self._samples()
        with replacing(self.folder / name, self.scratch) as file:
            hashed = _HashingFile(file)
            with tarfile.open(fileobj=hashed, mode="w|", format=tarfile.USTAR_FORMAT) as archive:  # type: ignore[call-overload]
                for sample in samples:
                    _add_array(archive, f"{sample.key}.tokens.npy", sample.tokens)
                    _add_array(archive, f"{sample.key}.lengths.npy", sample.lengths)
        self.shards.append(
            WrittenShard(
                name=name,
                split=self.split,
                bytes=hashed.bytes,
                sha256=hashed.hash.hexdigest(),
                tokens=self._tokens,
                lengths=[document.size for document in self._documents],
                sample_documents=[sample.lengths.size for sample in samples],
                checksums=[sample.checksum for sample in samples],
            )
        )
        self._documents, self._tokens = [], 0

    def _samples(self) -> list[Sample]:
        """Consecutive documents together up to SAMPLE_TOKENS; keys are unique in the whole dataset."""
        groups: list[list[np.ndarray]] = [[]]
        filled = 0
        for document in self._documents:
            if groups[-1] and filled + document.size > SAMPLE_TOKENS:
                groups.append([])
                filled = 0
            groups[-1].append(document)
            filled += document.size
        number = len(self.shards) * 2 + (self.split == "validation")
        return [
            Sample(
                f"{self.unit:05d}-{number:03d}{index:06d}",
                np.concatenate(group).astype(self.dtype, copy=False),
                np.array([document.size for document in group], LENGTH_DTYPE),
            )
            for index, group in enumerate(groups)
        ]


class _HashingFile:
    """Passes writes on and remembers their hash and number, so that a shard is hashed as it was meant."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        self.bytes += len(data)
        return self._file.write(data)


def _add_array(archive: tarfile.TarFile, name: str, array: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
    header = tarfile.TarInfo(name)  # owner, mode and time stay constant: equal documents give equal bytes
    header.size = buffer.tell()
    buffer.seek(0)
    archive.addfile(header, buffer)
