"""The documents that are named for a sequence are those it was cut from."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from kvm_dist.data.index import DatasetIndex
from kvm_dist.data.loader import BatchStream, SequenceReader
from kvm_dist.data.order import SequenceOrder
from kvm_dist.data.shards import read_shard
from kvm_dist.data.sources import Excerpt, in_words, sequence_sources
from kvm_dist.dropped import describe_into
from kvm_dist.exit_codes import DataError, NotFinite
from tests.kvm_dist.data.corpus import small_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetIndex:
    return small_dataset(tmp_path_factory.mktemp("dataset"))


@pytest.mark.parametrize("shuffle_tokens", [1, 7000, 10**6])
@pytest.mark.parametrize("length", [1, 32, 1000])
def test_excerpts_joined_by_separators_are_the_sequence(
    dataset: DatasetIndex, shuffle_tokens: int, length: int
) -> None:
    order = SequenceOrder(
        dataset.split("train"), sequence_length=length, shuffle_tokens=shuffle_tokens, seed=5
    )
    reader = SequenceReader(dataset, order, 0)
    epoch = order.epoch_sequences(0)
    positions = range(max(0, epoch - 40), epoch + 40)  # over the end of an epoch
    sources = sequence_sources(dataset, order, positions)
    shards = {shard.name: read_shard(dataset, shard) for shard in dataset.split("train")}
    assert list(sources) == list(positions)
    for position, excerpts in sources.items():
        batch = reader.batch(range(position, position + 1))
        whole = [*batch.inputs[0].tolist(), batch.labels[0, -1].item()]
        cut = []
        for one in excerpts:
            documents = shards[one.shard]
            start = int(documents.lengths[: one.document].sum())
            cut += documents.tokens[start + one.start : start + one.stop].tolist()
        separator = dataset.tokenizer.separator_id
        assert [token for token in whole if token not in (separator, -100)] == cut
    assert all(one.start < one.stop for excerpts in sources.values() for one in excerpts)


def test_neighbours_are_named_together() -> None:
    excerpts = [Excerpt("b.tar", number, 0, 1) for number in (4, 2, 3, 9)]
    assert in_words({6: [Excerpt("a.tar", 0, 3, 5)], 5: excerpts}) == (
        "sequences 5-6 of the run, cut from documents a.tar 0; b.tar 2-4, 9"
    )
    scattered = [Excerpt("a.tar", number, 0, 1) for number in range(0, 40, 2)]
    assert in_words({0: scattered}).endswith("a.tar 0, 2, 4, 6, 8, 10, 12, 14, and 12 more")
    many = {number: [Excerpt(f"{number:02d}.tar", 1, 0, 1)] for number in range(10)}
    assert in_words(many).endswith("07.tar 1; and of 2 more shards")


def test_damaged_lengths_are_told(dataset: DatasetIndex, tmp_path: Path) -> None:
    order = SequenceOrder(dataset.split("train"), sequence_length=32, shuffle_tokens=7000, seed=5)
    moved = dataset.model_copy(update={"directory": tmp_path})
    np.save(tmp_path / "lengths.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"lengths\.npy is missing or damaged"):
        sequence_sources(moved, order, range(3))


def test_what_cannot_be_told_or_written_is_told_instead(dataset: DatasetIndex, tmp_path: Path) -> None:
    def stream(index: DatasetIndex) -> BatchStream:
        return BatchStream(index, sequence_length=32, shuffle_tokens=7000, seed=5, batch_sequences=2)

    (batch,), error = islice(stream(dataset), 1), NotFinite("the loss is nan")
    unwritable = describe_into(tmp_path / "no" / "file", stream(dataset), writes=True)(1, batch, error)
    assert "sequences 0-1 of the run, cut from documents train-" in unwritable
    assert "was not written: " in unwritable
    moved = dataset.model_copy(update={"directory": tmp_path})
    assert "cannot be told: " in describe_into(tmp_path / "file", stream(moved), writes=True)(1, batch, error)
    assert not (tmp_path / "file").exists()
