"""A pool in memory: documents joined in the order of the epoch, as one flat token array."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvm_dist.data.index import DatasetIndex
from kvm_dist.data.members import BadShard
from kvm_dist.data.order import Pool, SequenceOrder
from kvm_dist.data.shards import Documents, read_shard
from kvm_dist.exit_codes import DataError

IGNORED = -100


@dataclass(frozen=True)
class TokenPool:
    """`tokens` [sequences * T + 1]; `known`, of the same shape, is False where the target is masked."""

    pool: Pool
    sequence_length: int
    tokens: np.ndarray
    known: np.ndarray
    windows: np.ndarray
    damaged: dict[str, int] = field(default_factory=dict)  # shard name -> masked documents

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs [T] and labels [T] of the `index`-th sequence, int64; masked labels are -100."""
        start = int(self.windows[index]) * self.sequence_length
        window = self.tokens[start : start + self.sequence_length + 1].astype(np.int64)
        known = self.known[start + 1 : start + self.sequence_length + 1]
        return window[:-1], np.where(known, window[1:], IGNORED)


def read_pool(index: DatasetIndex, order: SequenceOrder, pool: Pool, damaged_allowed: int) -> TokenPool:
    """Read the shards of a pool and join their documents.

    Documents of up to `damaged_allowed` damaged shards are replaced by masked separators of the same
    number, so that every other token keeps its place. Raises DataError beyond that.
    """
    parts: list[Documents] = []
    lost: list[bool] = []
    damaged: dict[str, int] = {}
    for number in pool.shards:
        shard = order.shards[number]
        try:
            parts.append(read_shard(index, shard))
            lost.append(False)
        except BadShard as error:
            damaged[shard.name] = shard.documents
            require_allowed(damaged, damaged_allowed, f"{index.directory / shard.name}: {error}")
            blank = np.full(shard.tokens, index.tokenizer.separator_id, index.tokenizer.dtype)
            parts.append(Documents(blank, index.document_lengths()[shard.name]))
            lost.append(True)
    joined, known = _join(parts, lost, order, pool, index.tokenizer.separator_id)
    return TokenPool(pool, order.sequence_length, joined, known, order.sequences(pool), damaged)


def require_allowed(damaged: dict[str, int], allowed: int, problem: str) -> None:
    """Stop once more shards are damaged than data.damaged_shards_allowed."""
    if len(damaged) > allowed:
        raise DataError(
            f"damaged shard: {problem}. Damaged so far: {len(damaged)}, "
            f"data.damaged_shards_allowed={allowed}; "
            "run `kvm-dist data check` for all of them, delete them and run `kvm-dist data prepare` "
            "again, or raise data.damaged_shards_allowed to train without them"
        )


def require_some_left(index: DatasetIndex, order: SequenceOrder, damaged: Mapping[str, int]) -> None:
    """Stop once no shard is left to learn from, whatever is allowed."""
    if all(shard.name in damaged for shard in order.shards):
        raise DataError(
            f"all {len(order.shards)} training shards in {index.directory} are damaged, nothing is left to "
            "train on; delete them and run `kvm-dist data prepare` again"
        )


def _join(
    parts: list[Documents], lost: list[bool], order: SequenceOrder, pool: Pool, separator: int
) -> tuple[np.ndarray, np.ndarray]:
    """A separator, then every document followed by one, then masked separators up to a whole window."""
    total = pool.sequences * order.sequence_length + 1
    joined = np.full(total, separator, parts[0].tokens.dtype)
    known = np.zeros(total, np.bool_)
    tokens = [part.tokens for part in parts]
    ends = [np.cumsum(part.lengths, dtype=np.int64) for part in parts]
    owner = np.repeat(np.arange(len(parts)), [part.lengths.size for part in parts]).tolist()
    stop = np.concatenate(ends).tolist()
    start = np.concatenate([end - part.lengths for end, part in zip(ends, parts, strict=True)]).tolist()
    position = 1
    for document in order.documents(pool, len(owner)).tolist():
        part, size = owner[document], stop[document] - start[document]
        joined[position : position + size] = tokens[part][start[document] : stop[document]]
        known[position : position + size + 1] = not lost[part]
        position += size + 1
    return joined, known
