"""KVM layers in two dimensions: the ranks of a node split heads, states go from node to node.

Two ways. By routes, as models/kvm/node.py does it: keys and values go to heads, routes and states back to
tokens; the backward goes from rank to rank. By heads, as models/kvm/by_heads.py does it: q, k and v go to
heads and the outputs back, so every rank runs the whole operator on its heads and the node's tokens, and the
backward has a hop per node too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvm_dist.bench.scaling.cluster import Cluster
from kvm_dist.bench.scaling.program import Begin, End, Program, Receive, Send, Step, Work
from kvm_dist.bench.scaling.relays import RankEdges, edge_bytes, hand_over, kvm_backward
from kvm_dist.bench.scaling.swaps import Swap
from kvm_dist.bench.scaling.work import (
    BACKWARD_FACTOR,
    ELEMENT_BYTES,
    KVMWork,
    Outside,
    kvm_work,
    outside,
)
from models.config import ModelConfig
from models.sequence_shards import NODE_MULTIPLE
from parallel.sequence.shard import equal_shards


def kvm_by_heads(
    cluster: Cluster,
    model: ModelConfig,
    node_spans: Sequence[tuple[int, int]],
    groups: int = 1,
    members: int | None = None,
) -> list[Program]:
    """node_spans: [start, stop) of every node. groups: of a member's heads, in which it hands over their
    states. members: how many of each node are given a program, all by default; they do the same.

    Token shifts, a token a layer, and the gates' swaps are left out. Outside of KVM every member counts as
    the one that has most tokens.
    """
    total, size = node_spans[-1][1], cluster.node_ranks
    programs: list[Program] = []
    for node, span in enumerate(node_spans):
        work = kvm_work(cluster, model, span, total, model.num_heads // size, groups)
        tokens = max(stop - start for start, stop in equal_shards(span[1] - span[0], size, NODE_MULTIPLE))
        beside = outside(cluster, model, tokens)
        for local in range(size if members is None else members):
            place = _Place(cluster, model, node_spans, node, local)
            states, queries = (
                place.swap(tokens * heads * model.head_width * ELEMENT_BYTES)
                for heads in (model.kvm.key_value_heads(model), model.num_heads)
            )
            member = _HeadMember(place, work, beside, states, queries, groups)
            steps: list[Step] = []
            for layer in range(model.num_layers):
                steps += member.forward(layer)
            steps.append(Work("loss", beside.loss))
            for layer in reversed(range(model.num_layers)):
                steps += member.backward(layer)
            programs.append(steps)
    return programs


def kvm_by_routes(cluster: Cluster, model: ModelConfig, spans: Sequence[tuple[int, int]]) -> list[Program]:
    """spans: of every rank. Gradients of the slots go back in as many groups of heads as a node has ranks."""
    total, size = spans[-1][1], cluster.node_ranks
    programs: list[Program] = []
    for rank, place in enumerate(RankEdges.all(model, spans)):
        node = rank // size
        node_spans = spans[node * size : (node + 1) * size]
        work = kvm_work(cluster, model, spans[rank], total, model.num_heads, size)
        parts = [kvm_work(cluster, model, span, total, model.num_heads // size) for span in node_spans]
        node_place = _Place(cluster, model, [(span[0], span[1]) for span in spans[::size]], node, rank % size)
        tokens = spans[rank][1] - spans[rank][0]
        row = model.num_heads * model.head_width * ELEMENT_BYTES
        chain = _NodeChain(
            node_place,
            sum(part.route for part in parts),
            sum(part.values for part in parts),
            to_heads=node_place.swap(2 * tokens * row),
            to_tokens=node_place.swap(place.before.get("kvm.keys", 0) + place.before.get("kvm.values", 0)),
        )
        beside = outside(cluster, model, spans[rank][1] - spans[rank][0])
        steps: list[Step] = []
        for layer in range(model.num_layers):
            steps += chain.forward(place, layer, work, beside)
        steps.append(Work("loss", beside.loss))
        for layer in reversed(range(model.num_layers)):
            steps += kvm_backward(place, layer, work, beside, size)
        programs.append(steps)
    return programs


@dataclass(frozen=True)
class _NodeChain:
    """The forward of one rank whose node routes by heads; seconds of its parts.

    to_heads: the swap of keys and values; to_tokens: of the states before the tokens.
    """

    node: "_Place"
    route: float
    values: float
    to_heads: Swap
    to_tokens: Swap

    def forward(self, place: RankEdges, layer: int, work: KVMWork, beside: Outside) -> Iterator[Step]:
        yield Work("project", beside.project, "forward", layer)
        yield from place.swap(layer, "kvm.shift")
        yield from place.swap(layer, "kvm.window")
        yield from self.to_heads.at_once(f"{layer}.kvm.node.tokens", "forward", layer)
        yield from self.node.take(layer, "kvm.keys")
        yield Work("route", self.route, "forward", layer)
        yield from self.node.give(layer, "kvm.keys")
        yield from self.node.take(layer, "kvm.values")
        yield Work("values", self.values, "forward", layer)
        yield from self.node.give(layer, "kvm.values")
        yield from self.to_tokens.at_once(f"{layer}.kvm.node.routes", "forward", layer)
        yield Work("attend", work.attend + beside.output, "forward", layer)
        yield from place.swap(layer, "feed_forward.shift")
        yield Work("feed-forward", beside.feed_forward, "forward", layer)


def one_of_each_node(programs: Sequence[Program], size: int) -> list[Program]:
    """The first member of every node as a rank of its own, where members do the same at the same time.

    programs: of those members alone, in nodes of `size`.
    """
    return [[_among_nodes(step, node, size) for step in program] for node, program in enumerate(programs)]


def _among_nodes(step: Step, node: int, size: int) -> Step:
    if isinstance(step, Work):
        return step
    if isinstance(step, Send):
        return Send(step.to // size, step.name, step.bytes)
    if isinstance(step, Receive):
        return Receive(step.source // size, step.name)
    if isinstance(step, Begin):
        return Begin(step.name, step.seconds, (node,))
    return End(step.name, (node,))


class _Place:
    """A rank's neighbours: those with its heads in the nodes before and after."""

    def __init__(
        self,
        cluster: Cluster,
        model: ModelConfig,
        node_spans: Sequence[tuple[int, int]],
        node: int,
        local: int,
    ) -> None:
        size = cluster.node_ranks
        self._cluster, self.size = cluster, size
        self.members = tuple(range(node * size, (node + 1) * size))
        self.last = node == len(node_spans) - 1
        self._previous = (node - 1) * size + local if node else None
        self._next = None if self.last else (node + 1) * size + local
        self._before = edge_bytes(model, node_spans[node][0]) if node else {}
        self._after = {} if self.last else edge_bytes(model, node_spans[node + 1][0])

    def swap(self, size: int) -> Swap:
        """Between the members; size: bytes of each."""
        return Swap.of(self._cluster, size, self.size, self.members)

    def give(self, layer: int, name: str, groups: int = 1) -> Iterator[Step]:
        """groups: messages that the tensors of the member's heads are spread over."""
        if self._next is not None:
            yield Send(self._next, f"{layer}.{name}", self._after[name] // self.size // groups)

    def take(self, layer: int, name: str) -> Iterator[Step]:
        if self._previous is not None:
            yield Receive(self._previous, f"{layer}.{name}")

    def give_back(self, layer: int, name: str, groups: int = 1) -> Iterator[Step]:
        if self._previous is not None:
            yield Send(self._previous, f"{layer}.{name}", self._before[name] // self.size // groups)

    def take_back(self, layer: int, name: str) -> Iterator[Step]:
        if self._next is not None:
            yield Receive(self._next, f"{layer}.{name}")


@dataclass(frozen=True)
class _HeadMember:
    """Forward and backward of one rank whose node computes by heads.

    states: the swap of keys, or of values; queries: of queries, or of outputs. Both go beside what does not
    need them.
    """

    place: "_Place"
    work: KVMWork
    beside: Outside
    states: Swap
    queries: Swap
    groups: int

    def forward(self, layer: int) -> Iterator[Step]:
        place, work, beside = self.place, self.work, self.beside
        yield Work("project", beside.unfinished, "forward", layer)
        for name, seconds, swap in (
            ("key", beside.finish_key, self.states),
            ("value", beside.finish_value, self.states),
            ("query", beside.finish_query, self.queries),
        ):
            yield Work(f"finish {name}", seconds, "forward", layer)
            yield from swap.start(f"{layer}.kvm.node.{name}", "forward", layer)
        for name in ("key", "value"):
            yield from self.states.land(f"{layer}.kvm.node.{name}", "forward", layer)
        yield from place.give(layer, "kvm.window")
        yield from place.take(layer, "kvm.window")
        yield from hand_over(place, layer, work, self.groups)
        yield from self.queries.land(f"{layer}.kvm.node.query", "forward", layer)
        yield Work("attend", work.attend, "forward", layer)
        yield from self.queries.at_once(f"{layer}.kvm.node.outputs", "forward", layer)
        yield Work("feed-forward", beside.output + beside.feed_forward, "forward", layer)

    def backward(self, layer: int) -> Iterator[Step]:
        place, work, beside, groups = self.place, self.work, self.beside, self.groups
        feed_forward = BACKWARD_FACTOR * (beside.feed_forward + beside.output)
        yield Work("feed-forward", feed_forward, "backward", layer)
        yield from self.queries.at_once(f"{layer}.kvm.node.outputs gradient", "backward", layer)
        yield Work("attend", work.window_backward, "backward", layer)
        yield from place.give_back(layer, "kvm.window.gradient")
        yield Work("attend", work.state_backward, "backward", layer)
        yield from self.queries.start(f"{layer}.kvm.node.query gradient", "backward", layer)
        yield from place.take_back(layer, "kvm.window.gradient")
        for _ in range(groups):
            yield from place.take_back(layer, "kvm.slots.gradient")
            yield Work("share out", work.share_out / groups, "backward", layer)
            yield from place.give_back(layer, "kvm.slots.gradient", groups)
        yield from place.give_back(layer, "kvm.share")
        yield from place.take_back(layer, "kvm.share")
        for name in ("value", "key"):
            yield from self.states.start(f"{layer}.kvm.node.{name} gradient", "backward", layer)
        for name, finish, swap in (
            ("query", beside.finish_query, self.queries),
            ("value", beside.finish_value, self.states),
            ("key", beside.finish_key, self.states),
        ):
            yield from swap.land(f"{layer}.kvm.node.{name} gradient", "backward", layer)
            yield Work("project", BACKWARD_FACTOR * (beside.unfinished / 3 + finish), "backward", layer)
