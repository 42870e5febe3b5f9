"""The recall task: what a sequence holds, and that training sees whole sequences of it."""

from pathlib import Path

import numpy as np
import pytest

from kvm_dist.data.loader import BatchStream
from kvm_dist.data.prepare import prepare
from kvm_dist.miniature.recall import (
    FILLERS,
    FIRST_FILLER,
    FIRST_KEY,
    FIRST_VALUE,
    KEYS,
    SEPARATOR,
    SEQUENCES_PER_DOCUMENT,
    VALUES,
    evaluation_sequences,
    recall_sequences,
    write_training_documents,
)


def pairs_in(inputs: np.ndarray, labels: np.ndarray) -> list[tuple[int, int, int]]:
    """Position of each key, the key and its value, read from the ids alone."""
    keys = np.nonzero((inputs >= FIRST_KEY) & (inputs < FIRST_KEY + KEYS))[0]
    return [(int(at), int(inputs[at]), int(labels[at])) for at in keys]


@pytest.mark.parametrize(("pairs", "occurrences"), [(1, 2), (5, 4), (13, 2)])
def test_every_pair_is_there_as_often_as_asked_for_with_the_distance_since_the_last_time(
    pairs: int, occurrences: int
) -> None:
    found = recall_sequences(4, 101, pairs, occurrences, 3)
    assert found.inputs.shape == found.labels.shape == found.distances.shape == (4, 101)
    assert (found.inputs[:, 1:] == found.labels[:, :-1]).all()
    assert (found.inputs[:, 0] == SEPARATOR).all()
    assert (found.labels[:, -1] == SEPARATOR).all()
    for inputs, labels, distances in zip(found.inputs, found.labels, found.distances, strict=True):
        last: dict[int, tuple[int, int]] = {}
        expected = np.zeros(101, np.int64)
        events = pairs_in(inputs, labels)
        for at, key, value in events:
            assert FIRST_VALUE <= value < FIRST_VALUE + VALUES
            if key in last:
                expected[at] = at - last[key][0]
                assert value == last[key][1]
            last[key] = at, value
        assert len(events) == pairs * occurrences
        assert len(last) == pairs
        np.testing.assert_array_equal(distances, expected)


def test_sequences_are_new_for_every_key_and_the_same_for_the_same_one() -> None:
    one, same, other = (recall_sequences(2, 64, 6, 2, key) for key in (5, 5, 6))
    np.testing.assert_array_equal(one.inputs, same.inputs)
    assert (one.inputs != other.inputs).mean() > 0.5
    assert (one.inputs[0] != one.inputs[1]).mean() > 0.5


def test_all_that_is_no_pair_is_filler() -> None:
    found = recall_sequences(16, 64, 6, 3, 1)
    filler = (found.inputs >= FIRST_FILLER) & (found.inputs < FIRST_FILLER + FILLERS)
    assert filler.sum(1).tolist() == [64 - 1 - 2 * 6 * 3] * 16
    assert len(np.unique(found.inputs[filler])) == FILLERS
    assert filler[:, 1:10].any()
    assert filler[:, -9:].any()


def test_pairs_that_do_not_fit_are_refused_with_what_would() -> None:
    with pytest.raises(ValueError, match="at least 81 tokens"):
        recall_sequences(1, 80, 20, 2, 0)
    assert recall_sequences(1, 81, 20, 2, 0).inputs.shape == (1, 81)
    with pytest.raises(ValueError, match=f"1 to {KEYS} pairs"):
        recall_sequences(1, 4096, KEYS + 1, 2, 0)


def test_a_training_sequence_is_one_sequence_of_the_task_and_none_of_the_evaluation(tmp_path: Path) -> None:
    count = 2 * SEQUENCES_PER_DOCUMENT + 9
    write_training_documents(tmp_path / "documents", count, 64, ((3, 4), (6, 2)))
    index = prepare(tmp_path / "documents", tmp_path / "shards", "bytes", progress=False)
    stream = BatchStream(index, sequence_length=64, shuffle_tokens=1 << 20, seed=1, batch_sequences=16)
    step = next(iter(stream))
    inputs, labels = (getattr(step.micro_batches[0], name).numpy() for name in ("inputs", "labels"))
    loads = []
    for row, row_labels in zip(inputs, labels, strict=True):
        assert row[0] == SEPARATOR
        assert SEPARATOR not in row[1:]
        events = pairs_in(row, row_labels)
        assert len(events) == 12
        loads.append(len({key for _, key, _ in events}))
    assert set(loads) == {3, 6}
    asked = evaluation_sequences(64, 64, 6).inputs
    assert not {row.tobytes() for row in asked} & {row.tobytes() for row in inputs}
