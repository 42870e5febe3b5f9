"""The index of a prepared dataset: what every shard holds and must hash to. Written last. No torch."""

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from kvm_dist.data.files import replacing
from kvm_dist.data.shard_writer import Split, WrittenShard
from kvm_dist.data.tokenizer import Tokenizer, token_dtype
from kvm_dist.exit_codes import DataError
from parallel.config import FrozenConfig

INDEX_NAME = "index.json"
LENGTHS_NAME = "lengths.npy"
SAMPLES_NAME = "samples.npy"
VERSION = 1
_SHA256 = r"^[0-9a-f]{64}$"


class TokenizerEntry(FrozenConfig):
    """Which tokenizer made the ids."""

    name: str
    fingerprint: str
    vocab_size: int = Field(ge=1)
    separator_id: int = Field(ge=0)
    dtype: Literal["|u1", "<u2", "<u4"]


class ShardEntry(FrozenConfig):
    """One tar file. The name's pattern keeps reading inside the dataset's folder."""

    name: str = Field(pattern=r"^(train|validation)-[0-9]{5,12}-[0-9]{3,12}\.tar$")
    split: Split
    samples: int = Field(ge=1)
    documents: int = Field(ge=1)
    tokens: int = Field(ge=1)
    bytes: int = Field(ge=1)
    sha256: str = Field(pattern=_SHA256)


class DatasetIndex(FrozenConfig):
    """A verified index. `digest` identifies the data: equal digests mean equal documents in equal order."""

    directory: Path = Field(exclude=True)
    version: int
    tokenizer: TokenizerEntry
    shards: tuple[ShardEntry, ...]
    lengths_sha256: str = Field(pattern=_SHA256)
    samples_sha256: str = Field(pattern=_SHA256)
    digest: str = Field(pattern=_SHA256)

    def split(self, name: Split) -> tuple[ShardEntry, ...]:
        return tuple(shard for shard in self.shards if shard.split == name)

    def tokens(self, split: Split) -> int:
        return sum(shard.tokens for shard in self.split(split))

    def document_lengths(self) -> dict[str, np.ndarray]:
        """Tokens of every document of every shard, by shard name: known also where the shard is damaged."""
        lengths = self._array(LENGTHS_NAME, self.lengths_sha256, (sum(s.documents for s in self.shards),))
        ends = np.cumsum([shard.documents for shard in self.shards])
        return {s.name: lengths[end - s.documents : end] for s, end in zip(self.shards, ends, strict=True)}

    def sample_checks(self) -> dict[str, np.ndarray]:
        """(documents, checksum) of every sample of every shard, [samples, 2], by shard name."""
        checks = self._array(SAMPLES_NAME, self.samples_sha256, (sum(s.samples for s in self.shards), 2))
        ends = np.cumsum([shard.samples for shard in self.shards])
        return {s.name: checks[end - s.samples : end] for s, end in zip(self.shards, ends, strict=True)}

    def _array(self, name: str, sha256: str, shape: tuple[int, ...]) -> np.ndarray:
        path = self.directory / name
        data = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(data).hexdigest() != sha256:
            raise DataError(
                f"{path} is missing or damaged; run `kvm-dist data prepare` again to write it anew"
            )
        array: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
        if array.shape != shape:
            raise DataError(f"{path} has shape {array.shape}, wanted {shape}; prepare the data again")
        return array


def write_index(directory: Path, scratch: Path, tokenizer: Tokenizer, shards: Sequence[WrittenShard]) -> None:
    """Write the arrays beside the index, then the index itself."""
    entries = sorted(shards, key=lambda shard: (shard.split, shard.name))
    lengths = np.array([n for shard in entries for n in shard.lengths], "<u4")
    pairs = [zip(shard.sample_documents, shard.checksums, strict=True) for shard in entries]
    checks = np.array([pair for shard_pairs in pairs for pair in shard_pairs], "<u4")
    content: dict[str, Any] = {
        "version": VERSION,
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "separator_id": tokenizer.separator_id,
            "dtype": token_dtype(tokenizer.vocab_size).str,
        },
        "shards": [shard.summary for shard in entries],
        "lengths_sha256": _write_array(directory / LENGTHS_NAME, scratch, lengths),
        "samples_sha256": _write_array(directory / SAMPLES_NAME, scratch, checks),
    }
    content["digest"] = _digest(content)
    with replacing(directory / INDEX_NAME, scratch) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")


def _write_array(path: Path, scratch: Path, array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    with replacing(path, scratch) as file:
        file.write(buffer.getvalue())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def _digest(content: dict[str, Any]) -> str:
    """Hash of all that training depends on; the tokenizer's name is a path on some machines."""
    hashed = {key: value for key, value in content.items() if key != "digest"}
    hashed["tokenizer"] = {key: value for key, value in content["tokenizer"].items() if key != "name"}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load_index(directory: str | Path) -> DatasetIndex:
    """The index in `directory`. Raises DataError if it is missing, damaged or of another version."""
    path = Path(directory) / INDEX_NAME
    if not path.is_file():
        raise DataError(
            f"no dataset at {directory}: {INDEX_NAME} is missing; "
            f"run `kvm-dist data prepare SOURCE {directory}`"
        )
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict) or "version" not in content:
            raise ValueError("not an object with a version")
        if content["version"] != VERSION:
            raise DataError(
                f"{path} has version {content['version']}, wanted {VERSION}; "
                "prepare the data again with this release"
            )
        index = DatasetIndex(directory=Path(directory).resolve(), **content)
        digest = _digest(content)
    except (ValueError, TypeError, KeyError, ValidationError) as error:
        raise DataError(
            f"{path} is damaged: {error}; run `kvm-dist data prepare` again to write it anew"
        ) from error
    if digest != index.digest:
        raise DataError(
            f"{path} was edited or damaged: its digest is {digest[:16]}, it says {index.digest[:16]}; delete "
            "it and run `kvm-dist data prepare` again to write it anew"
        )
    return index


def require_tokenizer(index: DatasetIndex, tokenizer: Tokenizer) -> None:
    """Refuse data whose ids another tokenizer made."""
    made_by = index.tokenizer
    if made_by.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{index.directory} was prepared with tokenizer {made_by.name!r} ({made_by.fingerprint[:12]}), "
            f"but data.tokenizer is {tokenizer.name!r} ({tokenizer.fingerprint[:12]}); "
            f"set data.tokenizer={made_by.name} or prepare the text again into another folder"
        )


def require_vocabulary(index: DatasetIndex, vocab_size: int) -> None:
    """Refuse data with ids that the model has no embedding for."""
    if index.tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"{index.directory} has token ids below {index.tokenizer.vocab_size} (tokenizer "
            f"{index.tokenizer.name!r}), but model.vocab_size={vocab_size}; set model.vocab_size to at least "
            f"{index.tokenizer.vocab_size}"
        )
