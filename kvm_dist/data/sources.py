"""Which documents the sequences of a batch were cut from, for whoever wants to look at them. No torch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from kvm_dist.data.index import DatasetIndex
from kvm_dist.data.order import Pool, SequenceOrder

MOST_NAMED = 8  # shards in one text, and groups of neighbours in one shard


@dataclass(frozen=True)
class Excerpt:
    """Tokens [start, stop) of a document; `document` counts from 0 in its shard."""

    shard: str
    document: int
    start: int
    stop: int


def sequence_sources(
    index: DatasetIndex, order: SequenceOrder, positions: range
) -> dict[int, tuple[Excerpt, ...]]:
    """What the inputs and labels of the sequences at `positions` hold, in the order read; no shard is read.

    Raises DataError if the index's lengths are damaged.
    """
    lengths = index.document_lengths()
    found: dict[int, tuple[Excerpt, ...]] = {}
    joined: dict[Pool, _JoinedPool] = {}
    for position in positions:
        place = order.place(position)
        if place.pool not in joined:
            joined = {place.pool: _JoinedPool.of(lengths, order, place.pool)}
        found[position] = tuple(joined[place.pool].sequence(place.index))
    return found


def in_words(sources: Mapping[int, Iterable[Excerpt]]) -> str:
    """Sequences and documents, neighbours together."""
    documents: dict[str, set[int]] = {}
    for one in (excerpt for excerpts in sources.values() for excerpt in excerpts):
        documents.setdefault(one.shard, set()).add(one.document)
    named = [f"{shard} {_ranges(documents[shard])}" for shard in sorted(documents)[:MOST_NAMED]]
    if len(documents) > MOST_NAMED:
        named.append(f"and of {len(documents) - MOST_NAMED} more shards")
    return f"sequences {_ranges(set(sources))} of the run, cut from documents " + "; ".join(named)


def _ranges(numbers: set[int]) -> str:
    """{1, 2, 3, 7} -> "1-3, 7"; of very many the first."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda item: item[1] - item[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(group) for _, group in runs)]
    words = [str(first) if first == last else f"{first}-{last}" for first, last in ends[:MOST_NAMED]]
    if rest := sum(last - first + 1 for first, last in ends[MOST_NAMED:]):
        words.append(f"and {rest} more")
    return ", ".join(words)


@dataclass(frozen=True)
class _JoinedPool:
    """The documents of a pool as `read_pool` joins them. starts, stops: of each in the joined tokens."""

    shards: list[str]
    owners: np.ndarray
    numbers: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    windows: np.ndarray
    sequence_length: int

    @classmethod
    def of(cls, lengths: Mapping[str, np.ndarray], order: SequenceOrder, pool: Pool) -> "_JoinedPool":
        shards = [order.shards[number].name for number in pool.shards]
        counts = [lengths[shard].size for shard in shards]
        documents = order.documents(pool, sum(counts))
        sizes = np.concatenate([lengths[shard] for shard in shards]).astype(np.int64)[documents]
        stops = np.cumsum(sizes + 1)  # a separator before the first and after each
        return cls(
            shards,
            np.repeat(np.arange(len(shards)), counts)[documents],
            np.concatenate([np.arange(count) for count in counts])[documents],
            stops - sizes,
            stops,
            order.sequences(pool),
            order.sequence_length,
        )

    def sequence(self, index: int) -> Iterator[Excerpt]:
        first = int(self.windows[index]) * self.sequence_length
        last = first + self.sequence_length + 1
        begin = int(np.searchsorted(self.stops, first, side="right"))
        end = int(np.searchsorted(self.starts, last, side="left"))
        for place in range(begin, end):
            start, stop = int(self.starts[place]), int(self.stops[place])
            shard = self.shards[int(self.owners[place])]
            yield Excerpt(shard, int(self.numbers[place]), max(first, start) - start, min(last, stop) - start)
