"""Ranks never wait for each other in a circle, even where a GPU runs nothing beside a message that waits.

NCCL and RCCL promise no more: kernels of two streams may run one after the other.
"""

import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kvm_dist.rounds import in_first_half, two_way
from models.loss import token_losses
from models.prefill import prefill
from parallel.config import NodeSplits
from parallel.mesh import Mesh
from parallel.sequence.context import HeadSplit, WholeSequence
from parallel.sequence.ranks import RankedSequence
from parallel.sequence.truncated import TruncatedExchange
from parallel.sequence.two_way import Arrival, Meeting, MeetingExchange
from tests.models.kvm.cases import random_case
from tests.models.kvm.test_nodes import run_nodes
from tests.models.kvm.test_ranks import run_shards
from tests.models.tiny import HYBRID, RECURRENCES, tiny_batch, tiny_model
from tests.parallel.test_alternation import run_in_turns
from tests.support.logical_all_to_all import LogicalRow, logical_node
from tests.support.logical_peers import LogicalPeers, QueuePeers
from tests.support.logical_ranks import QueueExchange, queue_exchanges, run_logical_ranks
from tests.support.one_queue import one_queue

LAYERS = [*HYBRID, "block_window", "ovq", "full_attention"]
CUTS = [0, 64, 96, 128, 160]


@pytest.fixture(autouse=True)
def queue(monkeypatch: pytest.MonkeyPatch) -> None:
    one_queue(monkeypatch)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("cuts", [[0, 96, 160], CUTS], ids=str)  # two ranks swap heads, four read by a chain
def test_steps_of_all_kinds_end(cuts: list[int], alternate: bool, recompute: bool) -> None:
    model = tiny_model(LAYERS, activation_checkpointing=recompute)
    run = run_in_turns(model, 3, cuts, alternate=alternate, timeout_seconds=30)
    assert len(run.gradients) == len(cuts) - 1


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("window_chunks", [1, 3])
def test_states_go_from_rank_to_rank(groups: int, window_chunks: int) -> None:
    case = random_case(68, heads=3, window_chunks=window_chunks)
    run_shards(case, [16, 4, 8, 40], head_split=HeadSplit(groups))  # a window that lies on three ranks


@pytest.mark.parametrize(("size", "groups"), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("splits", ["operator", "routing"])
def test_members_of_nodes_swap_and_hand_on(splits: NodeSplits, size: int, groups: int) -> None:
    run_nodes(random_case(69, heads=5), [16, 24, 8, 21], size, groups, splits)


def test_a_prompt_is_read_and_a_sequence_learned_from_without_gradients_over_edges() -> None:
    model, spans = tiny_model([*LAYERS, *RECURRENCES]), list(pairwise(CUTS))
    ids, labels = tiny_batch(CUTS[-1])

    def step(rank: int, exchange: QueueExchange) -> None:
        mesh, part = cast(Mesh, SimpleNamespace(sequence_rank=rank)), slice(*spans[rank])
        truncated = TruncatedExchange(exchange, torch.device("cpu"))
        logits = model(ids[:, part], RankedSequence(mesh, part.start, truncated, spans))
        token_losses(logits, labels[:, part])[0].backward()
        with torch.no_grad():
            prefill(model, ids[:, part], RankedSequence(mesh, part.start, exchange, spans, rows.rank(rank)))

    rows = LogicalRow(len(spans))
    run_logical_ranks(len(spans), step, timeout_seconds=30)


@dataclass(frozen=True)
class TwoWays:
    """A pair of micro-batches over four ranks, one from either end; size: ranks of a node."""

    meets: bool = True
    size: int = 1
    splits: NodeSplits = "operator"

    def run(self, timeout_seconds: float = 30) -> tuple[list[list[Tensor]], list[dict[str, Tensor]]]:
        """Logits of each micro-batch by place, gradients by rank."""
        model, spans = tiny_model([*LAYERS[:-1], *RECURRENCES]), list(pairwise(CUTS))
        ranks, peers = len(spans), [[LogicalPeers(len(spans), timeout_seconds) for _ in "ab"] for _ in "ab"]
        other_way, row = queue_exchanges(ranks, timeout_seconds), LogicalPeers(ranks, timeout_seconds)
        across = [row.of(rank) for rank in range(ranks)]
        parts: list[list[Any]] = [[None] * ranks, [None] * ranks]

        def step(rank: int, exchange: QueueExchange) -> dict[str, Tensor]:
            own, meeting = copy.deepcopy(model), Meeting()
            losses: dict[int, Tensor] = {}

            def forward(number: int) -> None:
                place = ranks - 1 - rank if number else rank
                transport = _Both(
                    other_way[place] if number else exchange,
                    peers[number][0].of(place),
                    across[rank],
                    ranks - 1 if number else None,
                )
                mesh = cast(Mesh, _Place(place, turned=number == 1, ranks=ranks))
                halves = [in_first_half(one, ranks, self.size) for one in range(ranks)]
                way = MeetingExchange(transport, meeting, mesh, lambda one: halves[one] != halves[rank])
                split = HeadSplit()
                if self.size > 1:
                    node = logical_node(
                        peers[number][1].of(place), place, self.size, tuple(spans), self.splits
                    )
                    split = HeadSplit(1, replace(node, peers=way))
                part = slice(*spans[place])
                context = RankedSequence(mesh, part.start, way, spans, head_split=split)
                ids, labels = tiny_batch(CUTS[-1], batch=1, seed=number)
                logits = own(ids[:, part], context)
                parts[number][place] = logits.detach()
                losses[number] = token_losses(logits, labels[:, part])[0]

            for forwards, backwards in two_way(2, rank, ranks, self.size):
                if self.meets:
                    meeting.open()
                for number in forwards:
                    forward(number)
                for number in backwards:
                    losses[number].backward()
                meeting.close()
            return {name: one.grad for name, one in own.named_parameters() if one.grad is not None}

        return parts, run_logical_ranks(ranks, step, timeout_seconds)


@pytest.mark.parametrize(
    "ways", [TwoWays(), TwoWays(size=2), TwoWays(size=2, splits="routing")], ids=["ranks", "nodes", "routing"]
)
def test_pairs_from_both_ends_meet_in_the_middle(ways: TwoWays) -> None:
    logits, gradients = ways.run()
    model = tiny_model([*LAYERS[:-1], *RECURRENCES])
    for number, parts in enumerate(logits):
        ids, labels = tiny_batch(CUTS[-1], batch=1, seed=number)
        whole = model(ids, WholeSequence())
        assert (torch.cat(parts, dim=1) - whole).abs().max() <= 1e-5
        token_losses(whole, labels)[0].backward()
    for name, one in model.named_parameters():
        assert one.grad is not None
        total = cast(Tensor, sum(each[name] for each in gradients))
        assert (total - one.grad).abs().max() <= 2e-6 * one.grad.abs().max() + 1e-6, name


def test_pairs_that_send_before_they_receive_would_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    one_queue(monkeypatch, silence_seconds=1)
    with pytest.raises(TimeoutError, match="nobody takes it"):
        TwoWays(meets=False).run(timeout_seconds=10)


@dataclass(frozen=True)
class _Place:
    sequence_rank: int
    turned: bool
    ranks: int

    def global_rank(self, place: int) -> int:
        return self.ranks - 1 - place if self.turned else place


class _Both:
    """The `Transport` of a logical rank. across: its peers by rank of the row; last: of the row, where the
    sequence begins there."""

    def __init__(
        self, exchange: QueueExchange, peers: QueuePeers, across: QueuePeers, last: int | None
    ) -> None:
        self.across, self.last = across, last
        self.has_previous, self.has_next = exchange.has_previous, exchange.has_next
        self.send_next, self.send_previous = exchange.send_next, exchange.send_previous
        self.receive_next, self.receive_previous = exchange.receive_next, exchange.receive_previous
        self.send_to, self.receive_from = peers.send_to, peers.receive_from

    def swap_with(self, rank: int, name: str, tensors: tuple[Tensor, ...]) -> Arrival:
        return self.across.swap_with(rank if self.last is None else self.last - rank, name, tensors)


def test_ranks_that_both_send_first_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one_queue(monkeypatch, silence_seconds=0.2)
    zeros = (torch.zeros(1),)

    def both_send(rank: int, exchange: QueueExchange) -> Any:
        if rank == 0:
            exchange.send_next("there", zeros)
            return exchange.receive_next("back", zeros)
        exchange.send_previous("back", zeros)
        return exchange.receive_previous("there", zeros)

    with pytest.raises(TimeoutError, match="nobody takes it"):
        run_logical_ranks(2, both_send, timeout_seconds=5)
