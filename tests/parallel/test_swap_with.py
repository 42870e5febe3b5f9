"""A message that goes to a rank in one operation with the one that comes from it."""

import pytest
import torch

from parallel.config import ParallelConfig
from parallel.mesh import Mesh
from parallel.sequence.exchange import RankExchange
from parallel.world import World
from tests.support.ranks import RankFailure, Ranks

CONFIG = ParallelConfig(sequence=2, two_way_chain=True, timeout_seconds=30)


def exchange_of(world: World, checked_messages: float | None) -> tuple[RankExchange, int]:
    mesh = Mesh.build(world, CONFIG)
    return RankExchange(mesh, checked_messages=checked_messages), mesh.sequence_rank


def swapped(world: World, checked_messages: float | None) -> list[torch.Tensor]:
    """Three swaps are begun before the first is taken, one of nothing; two dtypes in one."""
    exchange, rank = exchange_of(world, checked_messages)
    given = [
        (torch.full((3, 5), 1.0 + rank), torch.full((7,), 10 + rank, dtype=torch.int32)),
        (torch.empty(0, 4),),
        (torch.full((2, 2), 2.0 + rank, dtype=torch.bfloat16).t(),),
    ]
    arrivals = [exchange.swap_with(1 - rank, f"{n} of {rank}", one) for n, one in enumerate(given)]
    found = [arrivals[n].take(f"{n} of {1 - rank}", one) for n, one in enumerate(given)]
    assert exchange.bytes_sent == 64 + 32 + 0 + 16
    return [tensor for one in found for tensor in one]


@pytest.mark.parametrize("checked_messages", [None, 1, 0])
def test_each_rank_gets_what_the_other_sent(checked_messages: float | None, two_ranks: Ranks) -> None:
    for rank, found in enumerate(two_ranks.run(swapped, checked_messages)):
        other = 1 - rank
        floats, numbers, nothing, halves = found
        assert torch.equal(floats, torch.full((3, 5), 1.0 + other))
        assert torch.equal(numbers, torch.full((7,), 10 + other, dtype=torch.int32))
        assert nothing.shape == (0, 4)
        assert torch.equal(halves, torch.full((2, 2), 2.0 + other, dtype=torch.bfloat16))


def taken_as(world: World, name: str, numbers: int, checked_messages: float | None) -> None:
    exchange, rank = exchange_of(world, checked_messages)
    exchange.swap_with(1 - rank, "0.kvm.keys", (torch.zeros(4),)).take(name, (torch.zeros(numbers),))


@pytest.mark.parametrize(
    ("name", "numbers", "checked_messages", "said"),
    [
        (
            "0.kvm.values",
            4,
            None,
            r"diverged \(both ways\): wanted '0\.kvm\.values' of 16 bytes .* '0\.kvm\.keys'",
        ),
        (
            "0.kvm.keys",
            8,
            0,
            r"'0\.kvm\.keys' of 32 bytes was to come from rank \d for a message of 16 bytes",
        ),
    ],
)
def test_what_is_not_the_mirror_image_is_refused(
    name: str, numbers: int, checked_messages: float | None, said: str
) -> None:
    with pytest.raises(RankFailure, match=said), Ranks(2) as ranks:
        ranks.run(taken_as, name, numbers, checked_messages)
