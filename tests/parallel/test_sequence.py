import re
import time

import pytest
import torch
from torch import Tensor, nn

from parallel import collectives
from parallel.config import ParallelConfig
from parallel.mesh import Mesh
from parallel.sequence.context import WholeSequence
from parallel.sequence.exchange import RankExchange
from parallel.sequence.ranks import RankedSequence
from parallel.sequence.shard import equal_shards
from parallel.world import World
from tests.parallel.toy import toy_net
from tests.support.ranks import RankFailure, Ranks

MICRO_BATCHES = 3


def all_gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def toy_step(mesh: Mesh, exchange: RankExchange, length: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of this row of ranks, and the same from one rank."""
    generator = torch.Generator().manual_seed(seed * mesh.data_size + mesh.data_rank)
    whole = [
        torch.randn(2, length, 5, generator=generator, dtype=torch.float64) for _ in range(MICRO_BATCHES)
    ]
    weight = torch.randn(length, 5, generator=generator, dtype=torch.float64)
    start, stop = equal_shards(length, mesh.sequence_size)[mesh.sequence_rank]
    ours, theirs = toy_net(), toy_net()
    mine: list[Tensor] = []
    wanted: list[Tensor] = []
    for tokens in whole:
        local = tokens[:, start:stop].clone().requires_grad_()
        out = ours(local, RankedSequence(mesh, start, exchange))
        (out * weight[start:stop]).sum().backward()
        full = tokens.clone().requires_grad_()
        full_out = theirs(full, WholeSequence())
        (full_out * weight).sum().backward()
        assert local.grad is not None
        assert full.grad is not None
        mine += [out.detach(), local.grad]
        wanted += [full_out[:, start:stop].detach(), full.grad[:, start:stop]]
    exchange.drain()
    group = mesh.forward
    gradients = [collectives.sum(gradient, group) for gradient in all_gradients(ours)]
    return [*mine, *gradients], [*wanted, *all_gradients(theirs)]


def largest_error(world: World, data: int, sequence: int, length: int, iterations: int) -> float:
    mesh = Mesh.build(world, ParallelConfig(data=data, sequence=sequence, timeout_seconds=30))
    exchange = RankExchange(mesh)
    error = 0.0
    for iteration in range(iterations):
        mine, wanted = toy_step(mesh, exchange, length, iteration)
        error = max(error, *(float((a - b).abs().max()) for a, b in zip(mine, wanted, strict=True)))
    return error


@pytest.mark.parametrize("length", [6, 8, 14])
def test_two_ranks_give_the_outputs_and_every_gradient_of_one(two_ranks: Ranks, length: int) -> None:
    errors = two_ranks.run(largest_error, 1, 2, length, 5)
    assert max(errors) < 1e-11


def test_four_ranks_give_the_outputs_and_every_gradient_of_one_over_many_steps(four_ranks: Ranks) -> None:
    errors = four_ranks.run(largest_error, 1, 4, 16, 15)
    assert max(errors) < 1e-11


def test_rows_of_a_mesh_exchange_independently_over_many_steps(four_ranks: Ranks) -> None:
    errors = four_ranks.run(largest_error, 2, 2, 8, 30)
    assert max(errors) < 1e-11


def forward_only(world: World) -> tuple[bool, float]:
    mesh = Mesh.build(world, ParallelConfig(sequence=2, timeout_seconds=30))
    exchange = RankExchange(mesh)
    tokens = torch.randn(1, 8, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    start, stop = equal_shards(8, 2)[mesh.sequence_rank]
    with torch.no_grad():
        out = toy_net()(tokens[:, start:stop], RankedSequence(mesh, start, exchange))
        wanted = toy_net()(tokens, WholeSequence())[:, start:stop]
    exchange.drain()
    return out.requires_grad, float((out - wanted).abs().max())


def test_a_forward_without_gradients_gives_the_same_outputs(two_ranks: Ranks) -> None:
    assert [requires for requires, _ in two_ranks.run(forward_only)] == [False, False]
    assert max(error for _, error in two_ranks.run(forward_only)) < 1e-12


def mixed_messages(world: World) -> list[Tensor]:
    """Forward: odd sizes, several dtypes, an empty tensor, a strided one, all in one message."""
    mesh = Mesh.build(world, ParallelConfig(sequence=2, timeout_seconds=30))
    exchange = RankExchange(mesh)
    tensors = (
        torch.arange(7, dtype=torch.bfloat16).reshape(7, 1),
        torch.empty(0, 4),
        torch.arange(12.0, dtype=torch.float64).reshape(3, 4).t(),
        torch.tensor(-5),
        torch.tensor([-0.0, torch.nan, torch.inf]),
    )
    if exchange.has_next:
        kept = tensors[0].clone()
        exchange.send_next("mixed", (kept, *tensors[1:]))
        kept.zero_()  # a send owns its bytes
        exchange.drain()
        return list(tensors)
    return list(exchange.receive_previous("mixed", tuple(torch.empty_like(t) for t in tensors)))


def test_a_message_keeps_every_bit_of_several_tensors(two_ranks: Ranks) -> None:
    sent, received = two_ranks.run(mixed_messages)
    assert [t.shape for t in received] == [t.shape for t in sent]
    assert [t.contiguous().numpy(force=True).tobytes() for t in received[1:]] == [
        t.contiguous().numpy(force=True).tobytes() for t in sent[1:]
    ]
    assert torch.equal(received[0], sent[0])


def counted_bytes(world: World, length: int) -> int:
    mesh = Mesh.build(world, ParallelConfig(sequence=2, timeout_seconds=30))
    exchange = RankExchange(mesh)
    context = RankedSequence(mesh, mesh.sequence_rank * length, exchange)
    context.halo("halo", (torch.zeros(2, length, 8),), 3)
    exchange.drain()
    return exchange.bytes_sent


def test_bytes_sent_are_those_of_the_tokens_at_the_edge(two_ranks: Ranks) -> None:
    assert two_ranks.run(counted_bytes, 4) == [2 * 3 * 8 * 4, 0]


def diverged_order(world: World) -> str:
    mesh = Mesh.build(world, ParallelConfig(sequence=2, timeout_seconds=30))
    exchange = RankExchange(mesh)
    message = ""
    if exchange.has_next:
        exchange.send_next("0.first", (torch.ones(4),))
    else:
        with pytest.raises(ValueError, match="diverged") as caught:
            exchange.receive_previous("1.second", (torch.ones(3),))
        message = str(caught.value)
    collectives.barrier()
    return message


def test_a_diverged_order_of_messages_is_an_error_that_names_both() -> None:
    with Ranks(2) as ranks:
        _, message = ranks.run(diverged_order)
    assert "'1.second' of 16 bytes" in message
    assert "'0.first' of 16 bytes" in message


def silent_neighbour(world: World, seconds: float) -> None:
    mesh = Mesh.build(world, ParallelConfig(sequence=2, timeout_seconds=seconds))
    context = RankedSequence(mesh, mesh.sequence_rank * 4, RankExchange(mesh))
    if mesh.sequence_rank == 0:
        time.sleep(60)
    context.receive("3.rwkv7.state", (torch.zeros(2),))


def test_a_neighbour_that_stops_ends_in_a_time_out_that_names_peer_and_message() -> None:
    with pytest.raises(RankFailure, match="TimeoutError") as caught, Ranks(2) as ranks:
        ranks.run(silent_neighbour, 8.0, timeout_seconds=60)
    assert re.search(r"nothing came from rank 0 for '3\.rwkv7\.state' \(forward\) in 8 s", str(caught.value))


def ended_neighbour(world: World) -> None:
    mesh = Mesh.build(world, ParallelConfig(sequence=2, timeout_seconds=50))
    exchange = RankExchange(mesh)
    if mesh.sequence_rank == 1:
        raise SystemExit(3)
    exchange.receive_next("0.kvm gradient", (torch.zeros(2),))


def test_a_neighbour_that_ends_is_an_error() -> None:
    with pytest.raises(RankFailure, match=r"rank [01] (failed|ended)"), Ranks(2) as ranks:
        ranks.run(ended_neighbour, timeout_seconds=30)


def wide_halo_error(world: World, length: int) -> float:
    mesh = Mesh.build(world, ParallelConfig(sequence=world.size, timeout_seconds=30))
    exchange = RankExchange(mesh)
    mine, wanted = toy_step(mesh, exchange, length, seed=length)
    return max(float((a - b).abs().max()) for a, b in zip(mine, wanted, strict=True))


def test_a_halo_over_several_ranks_is_passed_on_and_its_gradient_back(four_ranks: Ranks) -> None:
    assert max(four_ranks.run(wide_halo_error, 4)) < 1e-11  # shards of one token, a window of three before
