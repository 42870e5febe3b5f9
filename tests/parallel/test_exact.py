"""Sequence ranks in processes of their own have the bits of one rank, each its part of them."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from models.budget import Budget, FixedBudget, PowerLawBudget, SaturatingBudget
from models.loss import token_losses
from parallel import collectives
from parallel.config import ParallelConfig
from parallel.mesh import Mesh
from parallel.sequence.all_to_all import GroupAllToAll
from parallel.sequence.context import WholeSequence
from parallel.sequence.exchange import RankExchange
from parallel.sequence.ranks import RankedSequence
from parallel.world import World
from tests.models.kvm.cases import PARAMETERS, PER_TOKEN, gradients, random_case
from tests.models.tiny import RECURRENCES, tiny_batch, tiny_model
from tests.support.ranks import Ranks

C = 4
LENGTHS = {2: [[44, 19], [4, 59]], 4: [[16, 16, 16, 15], [4, 28, 4, 27]]}
BUDGETS: list[Budget] = [
    FixedBudget(slots=9),
    PowerLawBudget(factor=2, minimum=C),
    SaturatingBudget(limit=30, minimum=C),
]
LAYERS = ["kvm", "rwkv7", "sliding_window", "full_attention", "block_window", "ovq", *RECURRENCES]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3))


def differing_tensors(world: World, lengths: list[int]) -> list[str]:
    """Of KVM under each budget, what on this rank is not what one rank has."""
    mesh = Mesh.build(world, ParallelConfig(sequence=world.size, timeout_seconds=30))
    exchange = RankExchange(mesh)
    stop = list(accumulate(lengths))[mesh.sequence_rank]
    own = slice(stop - lengths[mesh.sequence_rank], stop)
    differing: list[str] = []
    for budget in BUDGETS:
        case = random_case(sum(lengths), batch=2, heads=3, budget=budget, gate_appends=True)
        leaves = case.leaves(own.start, own.stop)
        output, _ = case.call(leaves, exchange=exchange, start=own.start)
        output.backward(case.grad_output[:, own])
        exchange.drain()
        found, whole = gradients(leaves), case.run("torch")
        checks = {"output": torch.equal(output.detach(), whole.output[:, own])}
        for name in PER_TOKEN:
            checks[name] = torch.equal(found[name], whole.gradients[name][:, own])
        for name in PARAMETERS:
            checks[name] = relative(collectives.sum(found[name]), whole.gradients[name]) < 2e-6
        differing += [f"{name} under {budget.kind}" for name, equal in checks.items() if not equal]
    return differing


@pytest.mark.parametrize("uneven", [0, 1])
@pytest.mark.parametrize("size", [2, 4])
def test_kvm_in_processes_has_the_bits_of_one_rank(
    two_ranks: Ranks, four_ranks: Ranks, size: int, uneven: int
) -> None:
    ranks = two_ranks if size == 2 else four_ranks
    assert ranks.run(differing_tensors, LENGTHS[size][uneven]) == [[]] * size


def model_on_shards(world: World, bounds: list[int], changes: dict[str, Any]) -> tuple[bool, float]:
    """Whether this rank's logits are one rank's, and the largest error of a gradient's sum over ranks."""
    mesh = Mesh.build(world, ParallelConfig(sequence=world.size, timeout_seconds=30))
    exchange, spans = RankExchange(mesh), list(pairwise(bounds))
    ids, labels = tiny_batch(bounds[-1])
    own = slice(*spans[mesh.sequence_rank])
    split, whole = tiny_model(LAYERS, **changes), tiny_model(LAYERS, **changes)
    logits = split(
        ids[:, own], RankedSequence(mesh, own.start, exchange, spans, GroupAllToAll(mesh, mesh.row))
    )
    token_losses(logits, labels[:, own])[0].backward()
    exchange.drain()
    wanted = whole(ids, WholeSequence())
    token_losses(wanted, labels)[0].backward()
    errors = []
    for one, other in zip(split.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        errors.append(relative(collectives.sum(one.grad), other.grad))
    return torch.equal(logits, wanted[:, own]), max(errors)


@pytest.mark.parametrize(
    ("bounds", "recompute"), [([0, 96, 149], False), ([0, 32, 64, 128, 149], True)], ids=["2", "4"]
)
def test_all_kinds_in_processes_have_the_logits_and_gradients_of_one_rank(
    two_ranks: Ranks, four_ranks: Ranks, bounds: list[int], recompute: bool
) -> None:
    ranks = two_ranks if len(bounds) == 3 else four_ranks
    changes = {"num_heads": 4, "activation_checkpointing": recompute}
    for equal, error in ranks.run(model_on_shards, bounds, changes):
        assert equal
        assert error < 5e-6
