import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch

from kvm_dist.data import pools, shards
from kvm_dist.data.index import DatasetIndex, ShardEntry
from kvm_dist.data.loader import BatchStream, StepBatch
from kvm_dist.data.order import SequenceOrder
from kvm_dist.data.shards import Documents, split_documents
from kvm_dist.data.validation import ValidationBatches
from tests.kvm_dist.data.corpus import small_dataset

LENGTH = 32


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetIndex:
    return small_dataset(tmp_path_factory.mktemp("dataset"))


def stream(dataset: DatasetIndex, **changes: object) -> BatchStream:
    settings: dict[str, object] = {
        "sequence_length": LENGTH,
        "shuffle_tokens": 7000,
        "seed": 5,
        "batch_sequences": 12,
    }
    return BatchStream(dataset, **{**settings, **changes})  # type: ignore[arg-type]


def rows(step: StepBatch) -> list[tuple[bytes, bytes]]:
    return [
        (inputs.numpy().tobytes(), labels.numpy().tobytes())
        for micro_batch in step.micro_batches
        for inputs, labels in zip(micro_batch.inputs, micro_batch.labels, strict=True)
    ]


def take(batches: BatchStream, count: int) -> list[list[tuple[bytes, bytes]]]:
    return [rows(step) for step in islice(batches, count)]


def epoch_rows(dataset: DatasetIndex, epoch: int, **changes: object) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and labels of every sequence of an epoch."""
    batches = stream(dataset, batch_sequences=1, **changes)
    order = batches._order
    start = sum(order.epoch_sequences(e) for e in range(epoch))
    batches = stream(dataset, batch_sequences=1, start_position=start, **changes)
    found = []
    for step in islice(batches, order.epoch_sequences(epoch)):
        (micro_batch,) = step.micro_batches
        found.append((micro_batch.inputs[0].numpy(), micro_batch.labels[0].numpy()))
    return found


@pytest.mark.parametrize("pool", [1, 7000, 10**6])
@pytest.mark.parametrize("length", [32, 33, 1000])
def test_an_epoch_predicts_every_token_and_separator_exactly_once(
    dataset: DatasetIndex, pool: int, length: int
) -> None:
    documents = list(split_documents(dataset, "train"))
    wanted = Counter(np.concatenate(documents).tolist())
    wanted[0] += len(documents)
    for epoch in (0, 1):
        found = epoch_rows(dataset, epoch, shuffle_tokens=pool, sequence_length=length)
        labels = np.concatenate([labels for _, labels in found])
        assert Counter(labels[labels >= 0].tolist()) == wanted


def test_an_epoch_contains_every_document_whole_after_its_windows_are_put_back(dataset: DatasetIndex) -> None:
    order = stream(dataset, shuffle_tokens=10**6)._order
    (pool,) = order.pools(0)
    read = pools.read_pool(dataset, order, pool, 0)
    joined = read.tokens[1:][read.known[1:]].astype(np.uint8).tobytes()
    documents = [document.tobytes() for document in split_documents(dataset, "train")]
    assert sorted(joined.split(b"\0")[:-1]) == sorted(documents)
    assert joined.split(b"\0")[:-1] != documents


def test_labels_are_the_next_inputs(dataset: DatasetIndex) -> None:
    for inputs, labels in epoch_rows(dataset, 0)[:50]:
        shown = labels[:-1] >= 0
        assert np.array_equal(labels[:-1][shown], inputs[1:][shown])
        assert inputs.dtype == labels.dtype == np.int64


def test_epochs_have_different_orders(dataset: DatasetIndex) -> None:
    first, second = ([i.tobytes() for i, _ in epoch_rows(dataset, epoch)] for epoch in (0, 1))
    assert first != second
    assert first == [i.tobytes() for i, _ in epoch_rows(dataset, 0)]
    assert first != [i.tobytes() for i, _ in epoch_rows(dataset, 0, seed=6)]


def test_neighbours_in_the_source_are_not_neighbours_in_the_stream(dataset: DatasetIndex) -> None:
    order = stream(dataset, shuffle_tokens=10**6)._order
    windows = order.sequences(order.pools(0)[0])
    assert (np.abs(np.diff(windows)) == 1).mean() < 0.05


@pytest.mark.parametrize(("data_size", "accumulation"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 3), (4, 3)])
def test_all_layouts_see_the_same_batches(dataset: DatasetIndex, data_size: int, accumulation: int) -> None:
    wanted = take(stream(dataset), 20)
    ranks = [
        list(islice(stream(dataset, data_size=data_size, data_rank=rank, accumulation=accumulation), 20))
        for rank in range(data_size)
    ]
    for number, steps in enumerate(zip(*ranks, strict=True)):
        assert all(len(step.micro_batches) == accumulation for step in steps)
        union = [
            row
            for micro_batches in zip(*(step.micro_batches for step in steps), strict=True)
            for micro_batch in micro_batches
            for row in rows(StepBatch((micro_batch,), 0, 0))
        ]
        assert union == wanted[number]
        assert {step.position for step in steps} == {(number + 1) * 12}


def test_a_stream_resumed_at_any_step_goes_on_as_if_never_stopped(dataset: DatasetIndex) -> None:
    wanted = take(stream(dataset), 50)
    steps = list(islice(stream(dataset), 23))
    resumed = stream(dataset, start_position=steps[-1].position)
    assert take(resumed, 27) == wanted[23:]
    assert resumed.position == 50 * 12


def test_a_change_of_layout_at_a_resume_leaves_no_gap_and_repeats_nothing(dataset: DatasetIndex) -> None:
    wanted = [row for step in take(stream(dataset), 30) for row in step]
    seen: list[tuple[bytes, bytes]] = []
    position = 0
    for data_size, accumulation, steps in [(4, 1, 7), (2, 3, 11), (1, 1, 12)]:
        layout = {"data_size": data_size, "accumulation": accumulation, "start_position": position}
        ranks = [list(islice(stream(dataset, data_rank=rank, **layout), steps)) for rank in range(data_size)]
        seen += [row for rank in ranks for step in rank for row in rows(step)]
        position = ranks[0][-1].position
    assert Counter(seen) == Counter(wanted)


def test_iterating_again_goes_on_at_the_position(dataset: DatasetIndex) -> None:
    batches = stream(dataset)
    assert take(batches, 4) + take(batches, 4) == take(stream(dataset), 8)


def test_loader_processes_change_neither_the_stream_nor_the_random_state(dataset: DatasetIndex) -> None:
    wanted = take(stream(dataset, start_position=36), 40)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert take(stream(dataset, start_position=36, workers=2), 40) == wanted
    assert torch.equal(torch.get_rng_state(), before)


def test_a_request_to_stop_the_whole_job_leaves_the_loader_processes_at_work(dataset: DatasetIndex) -> None:
    others = set(multiprocessing.active_children())  # ranks of other tests
    batches = iter(stream(dataset, workers=1))
    seen = [rows(next(batches))]
    (loader,) = set(multiprocessing.active_children()) - others
    os.kill(loader.pid or 0, signal.SIGTERM)
    seen += [rows(next(batches)) for _ in range(6)]  # more than were read ahead
    assert seen == take(stream(dataset), 7)


def test_a_seek_reads_one_pool(dataset: DatasetIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def read_shard(index: DatasetIndex, shard: ShardEntry) -> Documents:
        opened.append(shard.name)
        return shards.read_shard(index, shard)

    monkeypatch.setattr(pools, "read_shard", read_shard)
    batches = stream(dataset, start_position=2000, batch_sequences=1)
    assert not opened
    next(iter(batches))
    assert len(opened) == len(batches._order.place(2000).pool.shards) < len(dataset.split("train"))


@pytest.mark.parametrize("data_size", [1, 2, 3])
@pytest.mark.parametrize("rows_a_batch", [1, 4])
def test_validation_is_the_same_for_every_layout(
    dataset: DatasetIndex, data_size: int, rows_a_batch: int
) -> None:
    def valid(rank: int, size: int, rows: int) -> tuple[int, Iterator[bytes]]:
        batches = ValidationBatches(
            dataset,
            sequence_length=LENGTH,
            shuffle_tokens=10**6,
            sequences=17,
            batch_sequences=rows,
            data_rank=rank,
            data_size=size,
        )
        kept = [labels.numpy().tobytes() for batch in batches for labels in batch.labels]
        assert kept == [labels.numpy().tobytes() for batch in batches for labels in batch.labels]
        masked = np.full(LENGTH, -100).tobytes()
        return len(list(batches)), (row for row in kept if row != masked)

    _, single = valid(0, 1, 1)
    ranks = [valid(rank, data_size, rows_a_batch) for rank in range(data_size)]
    assert len({steps for steps, _ in ranks}) == 1
    assert Counter(row for _, found in ranks for row in found) == Counter(single)


def test_validation_takes_all_there_is_when_asked_for_more(dataset: DatasetIndex) -> None:
    batches = ValidationBatches(
        dataset, sequence_length=LENGTH, shuffle_tokens=10**6, sequences=10**6, batch_sequences=4
    )
    valid = sum(int((batch.labels >= 0).sum()) for batch in batches)
    documents = sum(shard.documents for shard in dataset.split("validation"))
    assert valid == dataset.tokens("validation") + documents


def test_batches_that_do_not_divide_are_refused(dataset: DatasetIndex) -> None:
    with pytest.raises(
        ValueError, match="batch_sequences=12 is not divisible by accumulation x data_size = 1 x 5"
    ):
        stream(dataset, data_size=5)


def test_the_order_of_a_large_index_is_found_by_arithmetic(dataset: DatasetIndex) -> None:
    """Thousands of shards that do not exist: positions in far epochs need no file."""
    entry = dataset.split("train")[0]
    many = [entry.model_copy(update={"name": f"train-{n:05d}-000.tar"}) for n in range(3000)]
    order = SequenceOrder(many, sequence_length=LENGTH, shuffle_tokens=10 * entry.tokens, seed=0)
    place = order.place(5 * order.epoch_sequences(0))
    assert place.pool.epoch in (4, 5)
