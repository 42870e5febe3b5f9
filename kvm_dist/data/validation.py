"""The validation sequences of one data rank: the same at every call, in every run, at every world size."""

from collections.abc import Iterator

import torch

from kvm_dist.data.index import DatasetIndex
from kvm_dist.data.loader import MicroBatch, SequenceReader
from kvm_dist.data.order import SequenceOrder
from kvm_dist.data.pools import IGNORED

# Validation does not depend on the run's seed: runs with different seeds stay comparable.
_SEED = 0


class ValidationBatches:
    """Iterable any number of times over micro-batches of `batch_sequences` sequences.

    All data ranks together see the first `sequences` sequences of a fixed shuffle of the validation split, or
    all of it. Every rank gets the same number of micro-batches, filled up with masked rows.
    """

    def __init__(
        self,
        index: DatasetIndex,
        *,
        sequence_length: int,
        shuffle_tokens: int,
        sequences: int,
        batch_sequences: int = 1,
        data_rank: int = 0,
        data_size: int = 1,
        damaged_shards_allowed: int = 0,
    ) -> None:
        self._order = SequenceOrder(
            index.split("validation"),
            sequence_length=sequence_length,
            shuffle_tokens=shuffle_tokens,
            seed=_SEED,
        )
        self._index = index
        self._allowed = damaged_shards_allowed
        self._rows = batch_sequences
        self._data_rank, self._data_size = data_rank, data_size
        self.sequences = min(sequences, self._order.epoch_sequences(0))
        self._kept: list[MicroBatch] | None = None

    def __len__(self) -> int:
        return -(-self.sequences // (self._rows * self._data_size))

    def __iter__(self) -> Iterator[MicroBatch]:
        """Micro-batches of inputs and labels [b, T], int64. The first call reads them and keeps them."""
        if self._kept is None:
            self._kept = list(self._read())
        for kept in self._kept:
            yield MicroBatch(kept.inputs.long(), kept.labels.long())

    def _read(self) -> Iterator[MicroBatch]:
        reader = SequenceReader(self._index, self._order, self._allowed)
        for number in range(len(self)):
            first = (number * self._data_size + self._data_rank) * self._rows
            present = range(first, min(first + self._rows, self.sequences))
            shape = (self._rows, self._order.sequence_length)
            inputs = torch.full(shape, self._index.tokenizer.separator_id, dtype=torch.int32)
            labels = torch.full(shape, IGNORED, dtype=torch.int32)
            if present:
                batch = reader.batch(present)
                inputs[: len(present)] = batch.inputs
                labels[: len(present)] = batch.labels
            yield MicroBatch(inputs, labels)
