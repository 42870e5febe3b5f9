import itertools

import numpy as np
import pytest

from kvm_dist.data.index import ShardEntry
from kvm_dist.data.order import SequenceOrder, permutation
from kvm_dist.exit_codes import DataError


def shards(*tokens: int) -> list[ShardEntry]:
    return [
        ShardEntry(
            name=f"train-{number:05d}-000.tar",
            split="train",
            samples=1,
            documents=1 + number % 3,
            tokens=count,
            bytes=1,
            sha256="0" * 64,
        )
        for number, count in enumerate(tokens)
    ]


def order(*tokens: int, length: int = 8, pool: int = 200, seed: int = 3) -> SequenceOrder:
    return SequenceOrder(shards(*tokens), sequence_length=length, shuffle_tokens=pool, seed=seed)


def test_the_permutation_never_changes() -> None:
    """A pinned value: a run resumed with another NumPy must see the same order."""
    assert permutation(10, 1, 2, 3).tolist() == [8, 1, 9, 3, 7, 5, 2, 0, 4, 6]
    assert permutation(8, 0, 12345, 0).tolist() == [7, 4, 6, 2, 5, 3, 1, 0]


@pytest.mark.parametrize("pool", [1, 100, 200, 10**6])
def test_an_epoch_holds_every_shard_once_in_pools_of_limited_size(pool: int) -> None:
    plan = order(50, 60, 70, 80, 90, 33, pool=pool)
    for epoch in range(3):
        pools = plan.pools(epoch)
        assert sorted(itertools.chain(*(p.shards for p in pools))) == list(range(6))
        for p in pools:
            assert len(p.shards) == 1 or sum(plan.shards[s].tokens for s in p.shards) <= pool
            targets = sum(plan.shards[s].tokens + plan.shards[s].documents for s in p.shards)
            assert 0 <= p.sequences * 8 - targets < 8


def test_positions_go_through_every_sequence_of_every_epoch_once() -> None:
    plan = order(50, 60, 70, 80)
    fresh = order(50, 60, 70, 80)
    places = [plan.place(position) for position in range(200)]
    wanted = [
        (epoch, pool.number, index)
        for epoch in range(10)
        for pool in fresh.pools(epoch)
        for index in range(pool.sequences)
    ]
    assert [(p.pool.epoch, p.pool.number, p.index) for p in places] == wanted[:200]


def test_a_place_does_not_depend_on_what_was_asked_before() -> None:
    straight, jumping = order(50, 60, 70), order(50, 60, 70)
    wanted = [straight.place(position) for position in range(150)]
    for position in (149, 3, 77, 0, 120):
        assert jumping.place(position) == wanted[position]


def test_the_pools_of_a_range_are_those_of_its_positions() -> None:
    plan = order(50, 60, 70, 80)
    for start, stop in [(0, 1), (0, 200), (13, 14), (20, 90), (5, 5)]:
        wanted = list(dict.fromkeys(plan.place(position).pool for position in range(start, stop)))
        assert plan.pools_between(range(start, stop)) == wanted


def test_every_epoch_and_every_seed_has_another_order() -> None:
    tokens = [50 + number for number in range(12)]
    seen = {
        tuple(pool.shards for pool in order(*tokens, seed=seed).pools(epoch))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(seen) == 9
    plan = order(500, pool=10**6)
    windows = {tuple(plan.sequences(plan.pools(epoch)[0]).tolist()) for epoch in range(4)}
    documents = {tuple(plan.documents(plan.pools(epoch)[0], 9).tolist()) for epoch in range(4)}
    assert len(windows) == len(documents) == 4


def test_permutations_are_permutations() -> None:
    for count in (0, 1, 2, 1000):
        assert np.array_equal(np.sort(permutation(count, 5)), np.arange(count))


def test_too_little_text_is_refused_with_the_numbers() -> None:
    with pytest.raises(DataError, match=r"train split holds 30 tokens.*data\.sequence_length=64.*at most 30"):
        order(10, 20, length=64)
    assert order(10, 20, length=30).epoch_sequences(0) >= 1
