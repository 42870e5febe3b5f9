"""Routing, or all of the operator, split by heads inside nodes of ranks gives the bits of one rank."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from models.kvm.torch_passes import TorchPasses
from parallel.config import NodeSplits, ParallelConfig
from parallel.mesh import Mesh
from parallel.sequence.all_to_all import Flight, GroupAllToAll, Part
from parallel.sequence.context import HeadSplit
from parallel.sequence.exchange import RankExchange
from parallel.sequence.node import Node
from parallel.world import World
from tests.models.kvm.cases import PARAMETERS, Case, assert_close, gradients, random_case
from tests.support.logical_all_to_all import logical_node
from tests.support.logical_peers import LogicalPeers, QueuePeers
from tests.support.logical_ranks import QueueExchange, run_logical_ranks
from tests.support.ranks import Ranks


def spans_of(lengths: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple(pairwise(accumulate(lengths, initial=0)))


def one_shard(case: Case, split: HeadSplit, span: tuple[int, int], exchange: Any) -> dict[str, Tensor]:
    """Output and gradients of the tokens of one rank."""
    start, stop = span
    leaves = case.leaves(start, stop)
    output, _ = case.call(leaves, exchange=exchange, start=start, head_split=split)
    output.backward(case.grad_output[:, start:stop])
    return {"output": output.detach(), **gradients(leaves)}


def run_nodes(
    case: Case, lengths: list[int], size: int, groups: int = 1, splits: NodeSplits = "routing"
) -> tuple[list[dict[str, Tensor]], list[QueuePeers]]:
    """What every rank finds, in nodes of `size` ranks, and what it sent to peers."""
    spans, peers = spans_of(lengths), LogicalPeers(len(lengths), timeout_seconds=20)
    mine = [peers.of(rank) for rank in range(len(lengths))]

    def shard(rank: int, exchange: QueueExchange) -> dict[str, Tensor]:
        split = HeadSplit(groups, logical_node(mine[rank], rank, size, spans, splits))
        return one_shard(case, split, spans[rank], exchange)

    return run_logical_ranks(len(lengths), shard, timeout_seconds=20), mine


def assert_bitwise_equal_to_one_rank(case: Case, parts: list[dict[str, Tensor]]) -> None:
    one = case.run("torch")
    for name, wanted in {"output": one.output, **one.gradients}.items():
        pieces = [part[name] for part in parts]
        if name in PARAMETERS:
            assert_close({name: sum(pieces[1:], pieces[0])}, {name: wanted}, 1e-5)
        else:
            assert torch.equal(torch.cat(pieces, dim=1), wanted), name


@pytest.mark.parametrize("splits", ["operator", "routing"])
@pytest.mark.parametrize(
    ("lengths", "size", "groups", "settings"),
    [
        ([16, 24, 8, 21], 2, 1, {}),
        ([16, 24, 8, 21], 2, 2, {"window_chunks": 1, "gate": False}),
        ([16, 24, 8, 21], 4, 1, {"value_radius": False, "temperatures": False}),
        ([8, 4, 4, 4, 16, 12, 4, 12, 3], 3, 3, {"gate_appends": True, "gate_first_state": True}),
        ([4] * 8, 2, 1, {"window_chunks": 5}),
        ([28, 32], 2, 1, {"max_slots": 7, "sinks": 2}),
        ([16, 24, 8, 21], 2, 1, {"group": 3}),
    ],
)
def test_nodes_give_the_bits_of_one_rank(
    lengths: list[int], size: int, groups: int, settings: dict[str, Any], splits: NodeSplits
) -> None:
    heads = 5
    case = random_case(sum(lengths), batch=2, heads=heads, **settings)
    if splits == "operator":
        groups = min(groups, heads // size)  # of a member's own heads
    parts, _ = run_nodes(case, lengths, size, groups, splits)
    assert_bitwise_equal_to_one_rank(case, parts)


@pytest.mark.parametrize("splits", ["operator", "routing"])
def test_nodes_give_the_bits_of_one_rank_at_a_common_head_width(splits: NodeSplits) -> None:
    case = random_case(640, heads=3, width=64, chunk=64, rotary_dims=32)
    parts, _ = run_nodes(case, [256, 64, 192, 128], 2, splits=splits)
    assert_bitwise_equal_to_one_rank(case, parts)


def test_a_member_sends_its_share_of_the_heads_to_each_other_member_and_to_the_next_node() -> None:
    batch, heads, width = 2, 4, 8
    case = random_case(64, batch=batch, heads=heads, width=width)
    _, peers = run_nodes(case, [16] * 4, 2)
    row = batch * heads // 2 * (2 * width + 1) * 4
    chunk = 4
    slots = [max(int(2 * stop**0.5), chunk) for stop in (16, 32, 48)]
    folded = [12, 16, 16, 12]  # the first and the last rank keep a window
    names = ["kvm.node.tokens", "kvm.keys", "kvm.values", "kvm.node.routes"]
    for rank, peer in enumerate(peers):
        other = rank ^ 1
        before_other = slots[other - 1] if other else 0
        routes = batch * folded[other] * heads // 2 * 4
        wanted = {
            "kvm.node.tokens": (other, folded[rank] * row),
            "kvm.keys": (rank + 2, slots[1] * batch * heads // 2 * width * 4),
            "kvm.values": (rank + 2, slots[1] * batch * heads // 2 * (width + 1) * 4),
            "kvm.node.routes": (other, before_other * row + routes),
        }
        sent = [name for name in names if rank < 2 or "node" in name]
        assert peer.sent == [(wanted[name][0], name, wanted[name][1]) for name in sent]


class LoggedFlight:
    def __init__(self, flight: Flight, name: str, log: list[str]) -> None:
        self.flight, self.name, self.log = flight, name, log

    def land(self) -> list[Part]:
        self.log.append(f"land {self.name}")
        return self.flight.land()


class LoggedNode:
    """Peers and swaps of a member, one log for both. Names without what all have."""

    def __init__(self, node: Node) -> None:
        self.log: list[str] = []
        self.peers, self.members = node.peers, node.all_to_all
        self.node = replace(node, peers=self, all_to_all=self)

    def start(self, name: str, parts: Sequence[Part], like: Sequence[Part]) -> LoggedFlight:
        name = name.removeprefix("kvm.node.")
        self.log.append(f"start {name}")
        return LoggedFlight(self.members.start(f"kvm.node.{name}", parts, like), name, self.log)

    def send_to(self, rank: int, name: str, tensors: tuple[Tensor, ...]) -> None:
        self.log.append(f"send {name.removeprefix('kvm.')}")
        self.peers.send_to(rank, name, tensors)

    def receive_from(self, rank: int, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.log.append(f"receive {name.removeprefix('kvm.')}")
        return self.peers.receive_from(rank, name, like)


STARTED = ["start gate", "start key", "start value", "start query", "land gate", "land key", "land value"]
RETURNED = ["start value gradient", "start key gradient", "start gate gradient"]
LANDED = [f"land {name} gradient" for name in ("query", "value", "key", "gate")]
OUTPUTS = ["start outputs", "land outputs", "start outputs gradient", "land outputs gradient"]
OF_FIRST_NODE = [
    *STARTED,
    *("send window", "send keys", "send values", "land query"),
    *OUTPUTS,
    "start query gradient",
    *("receive window.gradient", "receive slots.gradient", "receive share"),
    *RETURNED,
    *LANDED,
]
OF_LAST_NODE = [
    *STARTED,
    *("receive window", "receive keys", "receive values", "land query"),
    *OUTPUTS,
    *("send window.gradient", "start query gradient", "send slots.gradient", "send share"),
    *RETURNED,
    *LANDED,
]


def test_swaps_are_on_their_way_while_a_member_computes() -> None:
    """Queries travel while keys are routed and handed on, their gradients while those of the slots are."""
    case, spans, peers = random_case(64, heads=2), spans_of([16] * 4), LogicalPeers(4, timeout_seconds=20)
    nodes = [LoggedNode(logical_node(peers.of(rank), rank, 2, spans)) for rank in range(4)]

    def shard(rank: int, exchange: QueueExchange) -> dict[str, Tensor]:
        return one_shard(case, HeadSplit(1, nodes[rank].node), spans[rank], exchange)

    assert_bitwise_equal_to_one_rank(case, run_logical_ranks(4, shard, timeout_seconds=20))
    assert [one.log for one in nodes] == [OF_FIRST_NODE] * 2 + [OF_LAST_NODE] * 2


def test_the_only_node_routes_while_queries_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    case, spans, peers = random_case(48, heads=2), spans_of([32, 16]), LogicalPeers(2, timeout_seconds=20)
    nodes = [LoggedNode(logical_node(peers.of(rank), rank, 2, spans)) for rank in range(2)]
    route = TorchPasses.route

    def logged(passes: TorchPasses, heads: slice, keys: Tensor) -> Any:
        owner = next(one for one in nodes if getattr(passes.call.arrivals, "node", None) is one.node)
        owner.log.append("route")
        return route(passes, heads, keys)

    monkeypatch.setattr(TorchPasses, "route", logged)

    def shard(rank: int, exchange: QueueExchange) -> dict[str, Tensor]:
        return one_shard(case, HeadSplit(1, nodes[rank].node), spans[rank], exchange)

    parts = run_logical_ranks(2, shard, timeout_seconds=20)
    wanted = [*STARTED, "route", "land query", *OUTPUTS, "start query gradient", *RETURNED, *LANDED]
    assert [one.log for one in nodes] == [wanted] * 2
    monkeypatch.undo()
    assert_bitwise_equal_to_one_rank(case, parts)


def test_what_does_not_fit_a_node_is_refused() -> None:
    peers = LogicalPeers(4).of(0)
    with pytest.raises(ValueError, match=r"head_parallel=3: does not divide parallel\.sequence=4"):
        logical_node(peers, 0, 3, spans_of([16] * 4))
    case = random_case(64)
    for splits in ("operator", "routing"):
        with pytest.raises(ValueError, match=r"holds \((0, 12|12, 32)\)"):
            run_nodes_of_other_spans(case, splits)
    node = logical_node(peers, 0, 2, spans_of([16] * 4))
    with pytest.raises(ValueError, match="split the operator by heads keep no state"):
        case.call(case.leaves(0, 16), head_split=HeadSplit(1, node), return_state=True)


def run_nodes_of_other_spans(case: Case, splits: NodeSplits) -> None:
    peers = LogicalPeers(2, timeout_seconds=20)

    def shard(rank: int, exchange: QueueExchange) -> dict[str, Tensor]:
        split = HeadSplit(1, logical_node(peers.of(rank), rank, 2, spans_of([12, 20]), splits))
        return one_shard(case, split, spans_of([16, 16])[rank], exchange)

    run_logical_ranks(2, shard, timeout_seconds=20)


def node_step(world: World, case: Case, lengths: list[int], splits: NodeSplits) -> dict[str, Tensor]:
    mesh = Mesh.build(world, ParallelConfig(sequence=4, head_parallel=2, timeout_seconds=30))
    exchange, spans = RankExchange(mesh), spans_of(lengths)
    split = HeadSplit(2, Node(exchange, GroupAllToAll(mesh, mesh.node), mesh.sequence_rank, 2, spans, splits))
    for _ in range(3):
        found = one_shard(case, split, spans[mesh.sequence_rank], exchange)
    exchange.drain()
    return found


def test_two_nodes_of_two_processes_give_the_bits_of_one() -> None:
    case = random_case(69, batch=2, heads=4)
    with Ranks(4) as ranks:
        for splits in ("operator", "routing"):
            parts = ranks.run(node_step, case, [16, 24, 8, 21], splits)
            assert_bitwise_equal_to_one_rank(case, parts)
