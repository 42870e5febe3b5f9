"""Which tokens of a sequence each rank holds: pure integer functions, the same on every rank and machine.

A sequence is cut at multiples of `multiple` tokens, one block. A last block that is not full counts as whole:
whoever cuts the sequence pads it at its end.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise


def equal_shards(total: int, ranks: int, multiple: int = 1) -> list[tuple[int, int]]:
    """[start, stop) of every rank: whole blocks, at most one more on one rank than on another.

    Raises ValueError if there are fewer blocks than ranks.
    """
    blocks = -(-total // multiple)
    _require_blocks(blocks, ranks, multiple)
    cuts = [-(-blocks * rank // ranks) for rank in range(ranks + 1)]
    return _spans(cuts, multiple)


def balanced_shards(costs: Sequence[int], ranks: int, multiple: int = 1) -> list[tuple[int, int]]:
    """[start, stop) of every rank, such that the dearest rank costs as little as whole blocks allow.

    costs: of each block. Among the ways to cut, every cut lies as near as can be to its share of the whole.
    Raises ValueError if there are fewer blocks than ranks.
    """
    _require_blocks(len(costs), ranks, multiple)
    before = [0, *accumulate(costs)]  # cost of the blocks before each cut
    limit = _smallest_limit(before, ranks)
    earliest = _earliest_cuts(before, ranks, limit)
    cuts = [0]
    for rank in range(1, ranks):
        low = max(earliest[rank], cuts[-1] + 1)
        high = min(bisect_right(before, before[cuts[-1]] + limit) - 1, len(costs) - (ranks - rank))
        cuts.append(min(max(_nearest(before, before[-1] * rank, ranks), low), high))
    return _spans([*cuts, len(costs)], multiple)


def _require_blocks(blocks: int, ranks: int, multiple: int) -> None:
    for name, value in (("blocks", blocks), ("ranks", ranks), ("multiple", multiple)):
        if value < 1:
            raise ValueError(f"{name}={value}: wanted at least 1")
    if blocks < ranks:
        raise ValueError(
            f"{blocks} blocks of {multiple} tokens do not make {ranks} shards; use at most {blocks} ranks or "
            f"at least {(ranks - 1) * multiple + 1} tokens"
        )


def _spans(cuts: list[int], multiple: int) -> list[tuple[int, int]]:
    return [(start * multiple, stop * multiple) for start, stop in pairwise(cuts)]


def _smallest_limit(before: list[int], ranks: int) -> int:
    """The smallest cost that no rank needs to exceed: at least that of any one block."""
    low = max(stop - start for start, stop in pairwise(before))
    high = before[-1]
    while low < high:
        middle = (low + high) // 2
        if _earliest_cuts(before, ranks, middle)[0] == 0:
            high = middle
        else:
            low = middle + 1
    return low


def _earliest_cuts(before: list[int], ranks: int, limit: int) -> list[int]:
    """For each rank the first block it may begin with, if it and those after it keep to `limit`."""
    cuts = [len(before) - 1]
    for rank in reversed(range(ranks)):
        stop = cuts[-1]
        start = min(bisect_left(before, before[stop] - limit), stop - 1)
        cuts.append(max(start, rank))
    return cuts[::-1]


def _nearest(before: list[int], share: int, ranks: int) -> int:
    """The cut whose cost before it is nearest to share / ranks, the earlier of two."""
    after = bisect_left(before, -(-share // ranks))
    if after and share - before[after - 1] * ranks <= before[after] * ranks - share:
        return after - 1
    return after
