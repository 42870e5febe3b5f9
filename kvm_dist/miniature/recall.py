"""A recall task: pairs of a key and a value in filler; from its second time on a value can be known.

Ids: 0 separates documents, then come the keys, the values and the filler. All pairs are new in every
sequence, so that the only place to know a value from is the sequence itself. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SEPARATOR, FIRST_KEY = range(2)
KEYS, VALUES, FILLERS = 64, 16, 4
FIRST_VALUE = FIRST_KEY + KEYS
FIRST_FILLER = FIRST_VALUE + VALUES
SEQUENCES_PER_DOCUMENT = 128
_TRAINING, _EVALUATION = range(2)
_KEYS, _VALUES, _ORDER, _FILLER, _PLACES, _MIX = range(6)


@dataclass(frozen=True)
class RecallSequences:
    """`inputs` and `labels` [sequences, tokens], ids.

    `distances`, of the same shape: tokens since a pair was seen, at its second key, whose label is the value
    to recall; 0 elsewhere.
    """

    inputs: np.ndarray
    labels: np.ndarray
    distances: np.ndarray


def recall_sequences(count: int, tokens: int, pairs: int, occurrences: int, *key: int) -> RecallSequences:
    """`count` sequences of `tokens` tokens, a function of all arguments.

    Each holds `pairs` pairs, every one as often as there are `occurrences`, in any order and anywhere in the
    filler. Raises ValueError if they do not fit.
    """
    events = pairs * occurrences
    filler = tokens - 1 - 2 * events
    if not 1 <= pairs <= KEYS or occurrences < 2 or filler < 0:
        raise ValueError(
            f"{pairs} pairs in {tokens} tokens, {occurrences} times each; wanted 1 to {KEYS} pairs, 2 times "
            f"or more, and at least {2 * events + 1} tokens"
        )
    keys = FIRST_KEY + _words(_KEYS, key, count, KEYS).argsort(1, kind="stable")[:, :pairs]
    values = FIRST_VALUE + _below(VALUES, _VALUES, key, count, pairs)
    content = FIRST_FILLER + _below(FILLERS, _FILLER, key, count, tokens - 1)
    pair = _words(_ORDER, key, count, events).argsort(1, kind="stable") // occurrences
    at = _places(count, filler + events, events, key)
    rows = np.arange(count)[:, None]
    content[rows, at] = keys[rows, pair]
    content[rows, at + 1] = values[rows, pair]
    of_pair = pair.argsort(1, kind="stable").reshape(count, pairs, occurrences)  # events of each, in order
    where = at[rows[:, :, None], of_pair]
    distances = np.zeros((count, tokens), np.int64)
    distances[rows[:, :, None], where[:, :, 1:] + 1] = np.diff(
        where
    )  # the separator stands before the content
    ends = np.full((count, 1), SEPARATOR)
    return RecallSequences(np.hstack([ends, content]), np.hstack([content, ends]), distances)


def _places(count: int, units: int, events: int, key: Sequence[int]) -> np.ndarray:
    """Where each event begins, [count, events], ascending: units are events and single tokens of filler."""
    chosen = np.sort(_words(_PLACES, key, count, units).argsort(1, kind="stable")[:, :events], 1)
    return chosen + np.arange(events)


def evaluation_sequences(count: int, tokens: int, pairs: int) -> RecallSequences:
    """The same at every call, and none that training sees."""
    return recall_sequences(count, tokens, pairs, 2, _EVALUATION, tokens, pairs)


def write_training_documents(folder: Path, count: int, tokens: int, loads: Sequence[tuple[int, int]]) -> None:
    """`count` sequences, an equal share of each load (pairs, occurrences), as .npy files of ids.

    A document is as many sequences as fit its separators: joined with others by one separator and cut at
    `tokens`, every training sequence is exactly one sequence of the task.
    """
    shares = np.diff(np.linspace(0, count, len(loads) + 1).astype(int)).tolist()
    contents = np.concatenate(
        [
            recall_sequences(share, tokens, *load, _TRAINING, tokens, *load).labels
            for share, load in zip(shares, loads, strict=True)
        ]
    )
    mixed = contents[_words(_MIX, (tokens,), count).argsort(kind="stable")]
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, count, SEQUENCES_PER_DOCUMENT):
        document = mixed[start : start + SEQUENCES_PER_DOCUMENT].reshape(-1)[:-1]
        np.save(folder / f"{start // SEQUENCES_PER_DOCUMENT:05d}.npy", document.astype(np.uint8))


def _below(bound: int, purpose: int, key: Sequence[int], *shape: int) -> np.ndarray:
    return (_words(purpose, key, *shape) % np.uint64(bound)).astype(np.int64)


def _words(purpose: int, key: Sequence[int], *shape: int) -> np.ndarray:
    """Raw PCG64 words: NumPy promises that stream for ever, but not what `Generator` makes of it."""
    bits = np.random.PCG64(np.random.SeedSequence((purpose, *key)))
    return bits.random_raw(int(np.prod(shape))).reshape(shape)
