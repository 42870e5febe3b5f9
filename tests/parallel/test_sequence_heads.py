"""Parts swapped by all ranks of a row at once, between real processes."""

import re
import time

import pytest
import torch
from torch import Tensor

from parallel.config import ParallelConfig
from parallel.mesh import Mesh
from parallel.sequence.all_to_all import GroupAllToAll
from parallel.world import World
from tests.support.ranks import RankFailure, Ranks


def part(sender: int, receiver: int) -> Tensor:
    """Of a size that depends on both, none at all from a rank to itself if that is rank 0."""
    return torch.full((2, sender + 2 * receiver), 10.0 * sender + receiver, dtype=torch.bfloat16).t()


def swapped(world: World, data: int, sequence: int, turned: bool) -> tuple[list[Tensor], int]:
    mesh = Mesh.build(world, ParallelConfig(data=data, sequence=sequence, timeout_seconds=30))
    mesh = mesh.turned() if turned else mesh
    row, ranks, own = GroupAllToAll(mesh, mesh.row), range(sequence), mesh.sequence_rank
    like = [(torch.empty_like(part(other, own)),) for other in ranks]
    flights = [row.start("swap", [(part(own, other),) for other in ranks], like) for _ in range(3)]
    received = [[one for (one,) in flight.land()] for flight in flights]
    assert all(map(torch.equal, received[0], received[2]))
    return received[0], row.bytes_sent


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("data", "sequence"), [(1, 4), (2, 2)])
def test_every_rank_gets_its_part_from_each_rank_of_its_row(
    data: int, sequence: int, turned: bool, four_ranks: Ranks
) -> None:
    for rank, (received, bytes_sent) in enumerate(four_ranks.run(swapped, data, sequence, turned)):
        own = sequence - 1 - rank % sequence if turned else rank % sequence
        for sender, got in enumerate(received):
            assert torch.equal(got, part(sender, own))
        others = [part(own, other) for other in range(sequence) if other != own]
        assert bytes_sent == 3 * sum(one.nbytes for one in others)


def absent_rank(world: World) -> None:
    mesh = Mesh.build(world, ParallelConfig(sequence=2, timeout_seconds=8))
    if mesh.sequence_rank == 0:
        time.sleep(60)
    one = [(torch.zeros(1),)] * 2
    GroupAllToAll(mesh, mesh.row).start("3.full_attention.window.heads", one, one).land()


def test_a_rank_that_stays_away_ends_in_a_time_out_that_names_the_swap() -> None:
    with pytest.raises(RankFailure, match="TimeoutError") as caught, Ranks(2) as ranks:
        ranks.run(absent_rank, timeout_seconds=60)
    wanted = r"sequence rank 1 \(rank 1\): not all ranks came to '3\.full_attention\.window\.heads' in 8 s"
    assert re.search(wanted, str(caught.value))
