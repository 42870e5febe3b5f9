"""In which order sequences are seen: a pure function of seed, epoch, data and lengths. Imports no torch.

An epoch permutes the shards of a split and groups consecutive ones into pools of up to `shuffle_tokens`
tokens. In a pool the documents are permuted, joined (a separator before the first and after each), and cut
into windows of `sequence_length + 1` tokens that overlap by one, so that every token and separator is
predicted exactly once. The windows are permuted again. The last window of a pool ends in masked separators.
No rank, world size or worker enters: a position is the number of sequences consumed since training began.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvm_dist.data.index import ShardEntry
from kvm_dist.exit_codes import DataError

_SHARDS, _DOCUMENTS, _SEQUENCES = range(3)


def permutation(count: int, *key: int) -> np.ndarray:
    """A permutation of `count` numbers that depends on `key` alone, [count] int64.

    It sorts raw PCG64 words: NumPy promises that stream for ever, but not `Generator.permutation`.
    """
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(words, kind="stable")


@dataclass(frozen=True)
class Pool:
    """Shards shuffled together, as numbers into the split, and where their sequences lie in the epoch."""

    epoch: int
    number: int
    shards: tuple[int, ...]
    first_sequence: int
    sequences: int


@dataclass(frozen=True)
class Place:
    """A position: the `index`-th sequence of a pool."""

    pool: Pool
    index: int


class SequenceOrder:
    """Finds the place of every position by arithmetic on the index; nothing is read.

    Raises DataError if the split holds fewer tokens than one sequence.
    """

    def __init__(
        self, shards: Sequence[ShardEntry], *, sequence_length: int, shuffle_tokens: int, seed: int
    ) -> None:
        self.shards = tuple(shards)
        self.sequence_length = sequence_length
        self.shuffle_tokens = shuffle_tokens
        self.seed = seed
        tokens = sum(shard.tokens for shard in shards)
        if tokens < sequence_length:
            split = shards[0].split if shards else "this"
            raise DataError(
                f"the {split} split holds {tokens} tokens, fewer than one sequence of data.sequence_length="
                f"{sequence_length}; prepare more text or set it to at most {max(tokens, 1)}"
            )
        # Epochs differ a little in length, as pools do: starts are summed as far as they are asked for.
        self._epoch_starts = [0]
        self._pools: tuple[int, list[Pool]] = (-1, [])

    def pools(self, epoch: int) -> list[Pool]:
        """The pools of an epoch, in the order in which they are consumed."""
        if self._pools[0] != epoch:
            self._pools = (epoch, self._group(epoch))
        return self._pools[1]

    def epoch_sequences(self, epoch: int) -> int:
        last = self.pools(epoch)[-1]
        return last.first_sequence + last.sequences

    def place(self, position: int) -> Place:
        """Where in which pool of which epoch the sequence at `position` is."""
        while self._epoch_starts[-1] <= position:
            epoch = len(self._epoch_starts) - 1
            self._epoch_starts.append(self._epoch_starts[-1] + self.epoch_sequences(epoch))
        epoch = int(np.searchsorted(self._epoch_starts, position, side="right")) - 1
        inside = position - self._epoch_starts[epoch]
        pools = self.pools(epoch)
        number = int(np.searchsorted([pool.first_sequence for pool in pools], inside, side="right")) - 1
        return Place(pools[number], inside - pools[number].first_sequence)

    def pools_between(self, positions: range) -> list[Pool]:
        """The pools that consecutive positions lie in."""
        pools: list[Pool] = []
        position = positions.start
        while position < positions.stop:
            place = self.place(position)
            pools.append(place.pool)
            position += place.pool.sequences - place.index
        return pools

    def documents(self, pool: Pool, count: int) -> np.ndarray:
        """The order of the pool's documents, [count]."""
        return permutation(count, _DOCUMENTS, self.seed, pool.epoch, pool.number)

    def sequences(self, pool: Pool) -> np.ndarray:
        """Which window of the joined tokens comes at which index, [sequences]."""
        return permutation(pool.sequences, _SEQUENCES, self.seed, pool.epoch, pool.number)

    def _group(self, epoch: int) -> list[Pool]:
        groups: list[list[int]] = []
        filled = self.shuffle_tokens
        for shard in permutation(len(self.shards), _SHARDS, self.seed, epoch).tolist():
            tokens = self.shards[shard].tokens
            if filled + tokens > self.shuffle_tokens:
                groups.append([])
                filled = 0
            groups[-1].append(shard)
            filled += tokens
        pools: list[Pool] = []
        first = 0
        for number, group in enumerate(groups):
            predicted = sum(self.shards[shard].tokens + self.shards[shard].documents for shard in group)
            sequences = -(-predicted // self.sequence_length)
            pools.append(Pool(epoch, number, tuple(group), first, sequences))
            first += sequences
        return pools
