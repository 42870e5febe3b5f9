"""The unit of preparation: some pieces of the source, tokenised by one process and recorded. No torch."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvm_dist.data.documents import Document, Piece, read_documents
from kvm_dist.data.files import replacing
from kvm_dist.data.shard_writer import ShardWriter, WrittenShard
from kvm_dist.data.tokenizer import Tokenizer, require_ids_below, token_dtype
from kvm_dist.exit_codes import DataError

SCRATCH = ".prepare"
HASH_RANGE = 1 << 64


@dataclass(frozen=True)
class Unit:
    """Pieces that one process tokenises at a time."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def work_bytes(self) -> int:
        return sum(piece.work_bytes for piece in self.pieces)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps([piece.fingerprint for piece in self.pieces]).encode()).hexdigest()

    def record_path(self, out: Path) -> Path:
        return out / SCRATCH / f"unit-{self.number:05d}.json"


@dataclass(frozen=True)
class UnitRecord:
    """A finished unit. Documents whose hash is below `threshold` went to validation.

    `hashes` are the smallest and largest document hash, None without documents.
    """

    inputs: str
    threshold: int
    hashes: tuple[int, int] | None
    skipped: int
    shards: tuple[WrittenShard, ...]

    def splits_alike(self, threshold: int) -> bool:
        """Whether `threshold` would have divided these documents in the same way."""
        low, high = sorted((self.threshold, threshold))
        return self.hashes is None or low == high or self.hashes[0] >= high or self.hashes[1] < low


def group_pieces(pieces: Sequence[Piece], unit_bytes: int) -> list[Unit]:
    """Consecutive pieces in units of about `unit_bytes`."""
    groups: list[list[Piece]] = []
    filled = unit_bytes
    for piece in pieces:
        if filled + piece.work_bytes > unit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(piece)
        filled += piece.work_bytes
    return [Unit(number, tuple(group)) for number, group in enumerate(groups)]


def default_unit_bytes(pieces: Sequence[Piece]) -> int:
    """About 32 units of 1 to 256 MiB. A power of two: a source that grows a little keeps its units."""
    share = max(1, sum(piece.work_bytes for piece in pieces) // 32)
    return min(max(1 << share.bit_length(), 1 << 20), 256 << 20)


def document_hash(document: Document) -> int:
    """Depends on the content alone: copies of a document fall on the same side of the split."""
    return int.from_bytes(hashlib.blake2b(document.content, digest_size=8).digest(), "big")


def tokenise_unit(
    unit: Unit, out: Path, tokenizer: Tokenizer, threshold: int, shard_tokens: int
) -> UnitRecord:
    """Write the shards of a unit, then its record."""
    scratch = out / SCRATCH
    dtype = token_dtype(tokenizer.vocab_size)
    train = ShardWriter(out, scratch, "train", unit.number, shard_tokens, dtype)
    validation = ShardWriter(out, scratch, "validation", unit.number, shard_tokens, dtype)
    smallest, largest, skipped = HASH_RANGE, -1, 0
    for piece in unit.pieces:
        documents = 0
        for document in read_documents(piece):
            tokens = document.tokens if document.tokens is not None else tokenizer.encode(document.content)
            require_ids_below(tokens, tokenizer.vocab_size, str(piece.path))
            number = document_hash(document)
            smallest, largest = min(smallest, number), max(largest, number)
            (validation if number < threshold else train).add(tokens.astype(dtype, copy=False))
            documents += 1
        skipped += documents == 0
    train.close()
    validation.close()
    record = UnitRecord(
        inputs=unit.fingerprint,
        threshold=threshold,
        hashes=(smallest, largest) if largest >= 0 else None,
        skipped=skipped,
        shards=(*train.shards, *validation.shards),
    )
    with replacing(unit.record_path(out), scratch) as file:
        file.write(json.dumps(asdict(record)).encode())
    return record


def read_record(unit: Unit, out: Path) -> UnitRecord | None:
    """The record of a finished unit; None if it is not finished, its inputs changed, or a shard is gone."""
    path = unit.record_path(out)
    if not path.is_file():
        return None
    try:
        fields: dict[str, Any] = json.loads(path.read_bytes())
        shards = tuple(WrittenShard(**shard) for shard in fields.pop("shards"))
        hashes = fields.pop("hashes")
        record = UnitRecord(shards=shards, hashes=tuple(hashes) if hashes else None, **fields)
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged: {error}; delete it to have its part prepared again") from error
    if record.inputs != unit.fingerprint:
        return None
    for shard in record.shards:
        file = out / shard.name
        if not file.is_file() or file.stat().st_size != shard.bytes:
            return None
    return record
