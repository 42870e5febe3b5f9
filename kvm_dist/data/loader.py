"""The stream of training steps of one data rank."""

import itertools
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.utils.data import DataLoader, Dataset

from kvm_dist.data.index import DatasetIndex
from kvm_dist.data.order import Pool, SequenceOrder
from kvm_dist.data.pools import TokenPool, read_pool, require_allowed, require_some_left
from kvm_dist.data.shard_writer import Split
from kvm_dist.data.sources import Excerpt, sequence_sources
from kvm_dist.exit_codes import DataError
from kvm_dist.signals import STOP_SIGNALS


@dataclass(frozen=True)
class MicroBatch:
    """`inputs` [b, T] and `labels` [b, T], int64; labels are the next tokens, -100 where masked."""

    inputs: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class StepBatch:
    """What one data rank consumes in one optimizer step.

    `position` is the number of sequences consumed by all ranks after this step: the whole state of the
    stream. `damaged` names the masked shards in the pools of the step, with their documents.
    """

    micro_batches: tuple[MicroBatch, ...]
    position: int
    epoch: int
    damaged: Mapping[str, int] = field(default_factory=dict)


class SequenceReader:
    """Random access to the sequences of a split by position; keeps the pool that was read last."""

    def __init__(self, index: DatasetIndex, order: SequenceOrder, damaged_shards_allowed: int) -> None:
        self._index, self._order, self._allowed = index, order, damaged_shards_allowed
        self._kept: TokenPool | None = None
        self._damage: dict[Pool, dict[str, int]] = {}

    def batch(self, positions: range) -> MicroBatch:
        """The sequences at `positions`."""
        places = [self._order.place(position) for position in positions]
        rows = [self._read(place.pool).sequence(place.index) for place in places]
        return MicroBatch(
            torch.stack([torch.from_numpy(inputs) for inputs, _ in rows]),
            torch.stack([torch.from_numpy(labels) for _, labels in rows]),
        )

    def damage(self, positions: range) -> dict[str, int]:
        """The damaged shards, with their documents, in all pools that `positions` touches."""
        damaged: dict[str, int] = {}
        for pool in self._order.pools_between(positions):
            if pool not in self._damage:
                self._read(pool)
            damaged |= self._damage[pool]
        return damaged

    def _read(self, pool: Pool) -> TokenPool:
        if self._kept is None or self._kept.pool != pool:
            self._kept = None  # two pools would need twice the memory
            self._kept = read_pool(self._index, self._order, pool, self._allowed)
            self._damage[pool] = self._kept.damaged
        return self._kept


class _Numbers:
    """0, 1, 2 and so on."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class _Steps(Dataset[StepBatch | DataError]):
    """Steps by number. An error is returned, not raised: a loader process would wrap it in its traceback."""

    def __init__(self, reader: SequenceReader, order: SequenceOrder, shape: "_BatchShape") -> None:
        self._reader, self._order, self._shape = reader, order, shape

    def __getitem__(self, step: int) -> StepBatch | DataError:
        before = self._shape.start + step * self._shape.sequences
        after = before + self._shape.sequences
        try:
            micro_batches = tuple(map(self._reader.batch, self._shape.positions(step)))
            # Of the whole step, not of this rank's part: all ranks count alike and stop at the same step.
            damaged = self._reader.damage(range(before, after))
            return StepBatch(micro_batches, after, self._order.place(after).pool.epoch, damaged)
        except DataError as error:
            return error


@dataclass(frozen=True)
class _BatchShape:
    """Which positions one data rank takes of each step's batch."""

    start: int
    sequences: int
    accumulation: int
    data_rank: int
    data_size: int

    def positions(self, step: int) -> Iterator[range]:
        """Of the step's batch, micro-batch a of data rank d is the contiguous slice a * data_size + d."""
        rows = self.sequences // (self.accumulation * self.data_size)
        for micro_batch in range(self.accumulation):
            part = micro_batch * self.data_size + self.data_rank
            first = self.start + step * self.sequences + part * rows
            yield range(first, first + rows)


class BatchStream:
    """Endless training steps of one data rank, from any position.

    The union over the data ranks of a step is the same batch, in the same order, at every data degree,
    accumulation and number of loader processes. All sequence ranks of a data rank get the same sequences.

    Args:
        batch_sequences: Sequences of a step over all data ranks and micro-batches.
        start_position: Sequences consumed before, as in `StepBatch.position`.
        workers: Loader processes; 0 reads in this one.
        damaged_shards_allowed: Damaged shards that are masked and counted before DataError is raised.
        damaged: Damaged shards counted before, as in the attribute of that name.
    """

    def __init__(
        self,
        index: DatasetIndex,
        *,
        sequence_length: int,
        shuffle_tokens: int,
        seed: int,
        batch_sequences: int,
        accumulation: int = 1,
        data_rank: int = 0,
        data_size: int = 1,
        start_position: int = 0,
        workers: int = 0,
        damaged_shards_allowed: int = 0,
        damaged: Mapping[str, int] | None = None,
        split: Split = "train",
    ) -> None:
        if batch_sequences % (accumulation * data_size):
            raise ValueError(
                f"batch_sequences={batch_sequences} is not divisible by accumulation x data_size = "
                f"{accumulation} x {data_size}"
            )
        if not 0 <= data_rank < data_size or start_position < 0:
            raise ValueError(f"got data_rank={data_rank} of {data_size}, start_position={start_position}")
        self._order = SequenceOrder(
            index.split(split), sequence_length=sequence_length, shuffle_tokens=shuffle_tokens, seed=seed
        )
        self._index = index
        self._batch = (batch_sequences, accumulation, data_rank, data_size)
        self._workers = workers
        self._allowed = damaged_shards_allowed
        self.damaged: dict[str, int] = dict(damaged or {})
        self.position = start_position

    @property
    def lost_shards(self) -> int:
        """Damaged shards consumed so far."""
        return len(self.damaged)

    @property
    def corrupt_records(self) -> int:
        """Documents masked because their shard is damaged."""
        return sum(self.damaged.values())

    def sources(self, step: StepBatch) -> dict[int, tuple[Excerpt, ...]]:
        """What the sequences of a step, of all data ranks, were cut from, by their positions."""
        sequences = self._batch[0]
        return sequence_sources(self._index, self._order, range(step.position - sequences, step.position))

    def __iter__(self) -> Iterator[StepBatch]:
        """Steps from `position` on. Raises DataError at damage beyond the limit."""
        reader = SequenceReader(self._index, self._order, self._allowed)
        steps = _Steps(reader, self._order, _BatchShape(self.position, *self._batch))
        for step in (
            _in_processes(steps, self._workers) if self._workers else map(steps.__getitem__, _Numbers())
        ):
            if isinstance(step, DataError):
                raise step
            self.damaged |= step.damaged
            require_allowed(self.damaged, self._allowed, ", ".join(sorted(self.damaged)))
            require_some_left(self._index, self._order, self.damaged)
            self.position = step.position
            yield step


def _in_processes(steps: _Steps, workers: int) -> Iterator[StepBatch | DataError]:
    # A generator of its own: a loader draws from torch's global one, which must not depend on workers.
    return iter(
        DataLoader(
            steps,
            batch_size=None,
            sampler=_Numbers(),
            num_workers=workers,
            multiprocessing_context="spawn",
            generator=torch.Generator(),
            worker_init_fn=_outlive_stop_signals,
        )
    )


def _outlive_stop_signals(worker: int) -> None:
    """A request to stop that is sent to a whole job comes here too; the trainer still wants its last step."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
