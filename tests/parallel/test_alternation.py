"""Micro-batches that lie on the ranks from either end in turns: the same bits and messages, less waiting.

Ranks are threads of one process; no clock decides (tests/support/gates.py).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from models.backbone import Backbone
from models.loss import token_losses
from models.messages import edge_messages
from parallel.config import ParallelConfig
from parallel.mesh import Mesh
from parallel.sequence.context import Exchange, WholeSequence
from parallel.sequence.ranks import RankedSequence
from parallel.sequence.recorded import Message, RecordedExchange
from parallel.world import World
from tests.models.tiny import HYBRID, tiny_batch, tiny_model
from tests.support.gates import ThreadGates
from tests.support.logical_all_to_all import LogicalRow
from tests.support.logical_ranks import queue_exchanges, run_logical_ranks
from tests.support.ranks import Ranks

LAYERS = [*HYBRID, "block_window", "ovq", "full_attention"]
CUTS = {2: [0, 96, 160], 4: [0, 64, 96, 128, 160]}
TOLERANCE = 2e-6  # of the largest entry: float32 sums in another order


class HashedExchange(RecordedExchange):
    """Also keeps what was sent, bit by bit."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        super().__init__(exchange, rank)
        self.sent_bits: list[tuple[bytes, ...]] = []

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self.sent_bits.append(tuple(tensor.detach().numpy().tobytes() for tensor in tensors))
        super().send_next(name, tensors)

    def send_previous(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self.sent_bits.append(tuple(tensor.detach().numpy().tobytes() for tensor in tensors))
        super().send_previous(name, tensors)


@dataclass
class Run:
    """logits, messages, bits: of every micro-batch, by place in the sequence. gradients: by rank."""

    logits: list[list[Tensor]]
    messages: list[list[list[Message]]]
    bits: list[list[list[tuple[bytes, ...]]]]
    gradients: list[dict[str, Tensor]] = field(default_factory=list)


Hold = Callable[[Backbone, int, list[int]], None]


def run_in_turns(
    model: Backbone,
    micro_batches: int,
    cuts: list[int],
    *,
    alternate: bool = True,
    hold: Hold = lambda model, rank, now: None,
    timeout_seconds: float = 60.0,
) -> Run:
    """hold: may make a rank stand still, given its model and a list whose last entry is its micro-batch."""
    spans = list(pairwise(cuts))
    last = len(spans) - 1
    other_way = queue_exchanges(len(spans), timeout_seconds)
    rows = [LogicalRow(len(spans), timeout_seconds) for _ in range(micro_batches)]
    parts: list[list[Any]] = [[None] * len(spans) for _ in range(micro_batches)]

    def step(rank: int, exchange: Exchange) -> dict[str, Tensor]:
        own, now = copy.deepcopy(model), [0]
        hold(own, rank, now)
        for number in range(micro_batches):
            now.append(number)
            is_turned = alternate and number % 2 == 1
            place = last - rank if is_turned else rank
            way = HashedExchange(other_way[place] if is_turned else exchange, place)
            mesh, part = cast(Mesh, SimpleNamespace(sequence_rank=place)), slice(*spans[place])
            ids, labels = tiny_batch(cuts[-1], batch=1, seed=number)
            context = RankedSequence(mesh, part.start, way, spans, rows[number].rank(place))
            logits = own(ids[:, part], context)
            token_losses(logits, labels[:, part])[0].backward()
            parts[number][place] = (logits.detach(), way.messages, way.sent_bits)
        return {name: one.grad for name, one in own.named_parameters() if one.grad is not None}

    gradients = run_logical_ranks(len(spans), step, timeout_seconds)
    for place, one in enumerate(other_way):
        one.check_all_taken(place)
    logits, messages, bits = ([[one[i] for one in row] for row in parts] for i in range(3))
    return Run(logits, messages, bits, gradients)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_micro_batch_has_the_bits_of_one_rank_and_of_one_direction(ranks: int) -> None:
    model, cuts = tiny_model(LAYERS), CUTS[ranks]
    turns = run_in_turns(model, 3, cuts)
    plain = run_in_turns(model, 3, cuts, alternate=False)
    whole = copy.deepcopy(model)
    for number in range(3):
        ids, labels = tiny_batch(cuts[-1], batch=1, seed=number)
        expected = whole(ids, WholeSequence())
        token_losses(expected, labels)[0].backward()
        error = (torch.cat(turns.logits[number], dim=1) - expected).abs().max()
        assert error == 0 if ranks == 2 else error <= 1e-5  # four ranks read full attention by a chain
        assert all(map(torch.equal, turns.logits[number], plain.logits[number]))
        assert turns.bits[number] == plain.bits[number], "a state, a window or a gradient differs"
    for name, one in whole.named_parameters():
        assert one.grad is not None
        total = cast(Tensor, sum(gradients[name] for gradients in turns.gradients))
        assert (total - one.grad).abs().max() <= TOLERANCE * one.grad.abs().max() + 1e-6, name


@pytest.mark.parametrize("ranks", [2, 4])
def test_messages_are_those_of_the_closed_forms_in_both_directions(ranks: int) -> None:
    model, cuts = tiny_model(HYBRID), CUTS[ranks]
    run = run_in_turns(model, 2, cuts)
    for messages in run.messages:
        for place, log in enumerate(messages):
            for phase, edge in (("forward", cuts[place + 1]), ("backward", cuts[place])):
                crossing = edge_messages(model.config, edge) if 0 < edge < cuts[-1] else ()
                expected = [(one.name, one.size(4)) for one in crossing if one.phase == phase]
                sent = [
                    (one.name, one.bytes) for one in log if one.operation == "send" and one.phase == phase
                ]
                assert sent == expected, f"place {place}, {phase}"


def the_first_rank_waits_for_the_last(ranks: int, gates: ThreadGates) -> Hold:
    """Rank 0 does not end the backward of micro-batch 0 before the last rank has ended a forward of 1."""

    def hold(model: Backbone, rank: int, now: list[int]) -> None:
        def end_of_forward(*_: Any) -> None:
            if now[-1] == 1:
                gates.open("forward of 1")

        def end_of_backward(*_: Any) -> None:
            if now[-1] == 0:
                gates.wait("forward of 1")

        if rank == ranks - 1:
            model.norm_head.register_forward_pre_hook(end_of_forward)
        if rank == 0:
            model.norm_embedding.register_full_backward_pre_hook(end_of_backward)

    return hold


def places(world: World) -> tuple[int | None, ...]:
    mesh = Mesh.build(world, ParallelConfig(data=2, sequence=2, timeout_seconds=30))
    there = mesh.turned()
    assert there.turned() == mesh
    assert (there.backward, there.forward) == (mesh.forward, mesh.backward), "a group has one way of travel"
    assert there.global_rank(there.sequence_rank) == world.rank
    return there.data_rank, there.sequence_rank, there.previous_rank, there.next_rank


def test_a_turned_mesh_counts_sequence_ranks_from_the_other_end_of_their_row(four_ranks: Ranks) -> None:
    assert four_ranks.run(places) == [(0, 1, 1, None), (0, 0, None, 0), (1, 1, 3, None), (1, 0, None, 2)]


WAVES = ["kvm", "rwkv7", "sliding_window", "block_window", "ovq"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_last_rank_ends_a_forward_before_the_first_has_ended_the_backward_before_it(ranks: int) -> None:
    hold = the_first_rank_waits_for_the_last(ranks, ThreadGates(30))
    run_in_turns(tiny_model(WAVES), 2, CUTS[ranks], hold=hold)


def test_in_one_direction_the_last_rank_waits_for_the_first() -> None:
    hold = the_first_rank_waits_for_the_last(2, ThreadGates(1))
    with pytest.raises((TimeoutError, ConnectionError), match="forward of 1"):
        run_in_turns(tiny_model(["kvm"]), 2, CUTS[2], alternate=False, hold=hold, timeout_seconds=5)
