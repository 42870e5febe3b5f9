"""How a sequence is cut: exhaustively, against every other way to cut it."""

import random
from collections.abc import Iterator
from itertools import combinations

import pytest

from parallel.sequence.shard import balanced_shards, equal_shards


def every_cut(blocks: int, ranks: int) -> Iterator[list[tuple[int, int]]]:
    for inner in combinations(range(1, blocks), ranks - 1):
        yield list(zip((0, *inner), (*inner, blocks), strict=True))


def dearest(costs: list[int], spans: list[tuple[int, int]]) -> int:
    return max(sum(costs[start:stop]) for start, stop in spans)


def some_costs(seed: int, blocks: int) -> list[int]:
    """Costs that grow along the sequence, as those of a growing state do."""
    generator = random.Random(seed)
    return sorted(generator.randrange(1, 60) for _ in range(blocks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_no_other_cut_leaves_less_to_the_dearest_rank(ranks: int) -> None:
    for seed in range(30):
        costs = some_costs(seed, blocks=ranks + seed % 9)
        spans = balanced_shards(costs, ranks)
        cuts = list(every_cut(len(costs), ranks))
        assert spans in cuts
        assert dearest(costs, spans) == min(dearest(costs, other) for other in cuts)


def test_costs_that_rise_and_fall_are_balanced_as_well() -> None:
    for seed in range(30):
        generator = random.Random(seed)
        costs = [generator.randrange(60) for _ in range(9)]
        spans = balanced_shards(costs, 4)
        assert dearest(costs, spans) == min(dearest(costs, other) for other in every_cut(9, 4))


def test_a_growing_cost_makes_late_shards_shorter_and_all_nearly_equal() -> None:
    costs = [1000 + block for block in range(4000)]
    spans = balanced_shards(costs, 8, multiple=256)
    lengths = [stop - start for start, stop in spans]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2 * lengths[-1]
    shares = [sum(costs[start // 256 : stop // 256]) for start, stop in spans]
    assert max(shares) - min(shares) <= 2 * max(costs)


def test_equal_costs_make_equal_shards() -> None:
    assert balanced_shards([7] * 12, 4, multiple=16) == equal_shards(12 * 16, 4, 16)


def test_equal_shards_are_whole_blocks_and_differ_by_one_at_most() -> None:
    assert equal_shards(24, 3, 4) == [(0, 8), (8, 16), (16, 24)]
    assert equal_shards(5, 1) == [(0, 5)]
    assert equal_shards(101, 4, 16) == [(0, 32), (32, 64), (64, 96), (96, 112)]
    assert equal_shards(81, 4, 16) == [(0, 32), (32, 48), (48, 80), (80, 96)]


def test_too_few_blocks_name_the_most_ranks_and_the_shortest_sequence_that_are_enough() -> None:
    with pytest.raises(ValueError, match=r"4 blocks of 16 tokens.*at most 4 ranks or at least 65 tokens"):
        equal_shards(64, 5, 16)
    with pytest.raises(ValueError, match="at most 2 ranks or at least 33 tokens"):
        balanced_shards([1] * 2, 3, 16)
    assert len(equal_shards(65, 5, 16)) == 5
    assert len(balanced_shards([1] * 3, 3, 16)) == 3


def test_what_blocks_do_not_divide_is_spread_and_not_left_to_one_rank() -> None:
    lengths = [stop - start for start, stop in balanced_shards([5] * 10, 4)]
    assert sorted(lengths) == [2, 2, 3, 3]
