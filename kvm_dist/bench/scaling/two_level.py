"""KVM layers in two dimensions: the ranks of a node split heads, states go from node to node.

Two ways. By routes, as models/kvm/node.py does it: keys and values go to heads, routes and states back to
tokens; the backward goes from rank to rank. By heads, as models/kvm/by_heads.py does it: q, k and v go to
heads and the outputs back, so every rank runs the whole operator on its heads and the node's tokens, and the
backward has a hop per node too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvm_dist.bench.scaling.cluster import Cluster
from kvm_dist.bench.scaling.program import Program, Receive, Send, Step, Work, collective
from kvm_dist.bench.scaling.relays import RankEdges, edge_bytes, kvm_backward
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
    cluster: Cluster, model: ModelConfig, node_spans: Sequence[tuple[int, int]]
) -> list[Program]:
    """node_spans: [start, stop) of every node. Token shifts, a token a layer, are left out.

    Outside of KVM every member counts as the one that has most tokens.
    """
    total, size = node_spans[-1][1], cluster.node_ranks
    programs: list[Program] = []
    for node, span in enumerate(node_spans):
        work = kvm_work(cluster, model, span, total, model.num_heads // size)
        tokens = max(stop - start for start, stop in equal_shards(span[1] - span[0], size, NODE_MULTIPLE))
        beside = outside(cluster, model, tokens)
        swap = cluster.all_to_all_seconds(size, tokens * model.num_heads * model.head_width * ELEMENT_BYTES)
        for local in range(size):
            place = _Place(cluster, model, node_spans, node, local)
            steps: list[Step] = []
            for layer in range(model.num_layers):
                steps += _forward(place, layer, work, beside, swap)
            steps.append(Work("loss", beside.loss, "backward"))
            for layer in reversed(range(model.num_layers)):
                steps += _backward(place, layer, work, beside, swap)
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
        chain = _NodeChain(
            _Place(cluster, model, [(span[0], span[1]) for span in spans[::size]], node, rank % size),
            sum(part.route for part in parts),
            sum(part.values for part in parts),
            *_swaps(cluster, model, spans[rank], place),
        )
        beside = outside(cluster, model, spans[rank][1] - spans[rank][0])
        steps: list[Step] = []
        for layer in range(model.num_layers):
            steps += chain.forward(place, layer, work, beside)
        steps.append(Work("loss", beside.loss, "backward"))
        for layer in reversed(range(model.num_layers)):
            steps += kvm_backward(place, layer, work, beside, size)
        programs.append(steps)
    return programs


def _swaps(
    cluster: Cluster, model: ModelConfig, span: tuple[int, int], place: RankEdges
) -> tuple[float, float]:
    """Seconds of the two swaps in a node: keys and values of the tokens, states before the tokens."""
    row = model.num_heads * model.head_width * ELEMENT_BYTES
    state = place.before.get("kvm.keys", 0) + place.before.get("kvm.values", 0)
    return (
        cluster.all_to_all_seconds(cluster.node_ranks, 2 * (span[1] - span[0]) * row),
        cluster.all_to_all_seconds(cluster.node_ranks, state),
    )


@dataclass(frozen=True)
class _NodeChain:
    """The forward of one rank whose node routes by heads; seconds of its parts."""

    node: "_Place"
    route: float
    values: float
    to_heads: float
    to_tokens: float

    def forward(self, place: RankEdges, layer: int, work: KVMWork, beside: Outside) -> Iterator[Step]:
        yield Work("project", beside.project, "forward", layer)
        yield from place.swap(layer, "kvm.shift")
        yield from place.swap(layer, "kvm.window")
        yield from self.node.swap("keys and values to heads", self.to_heads)
        yield from self.node.take(layer, "kvm.keys")
        yield Work("route", self.route, "forward", layer)
        yield from self.node.give(layer, "kvm.keys")
        yield from self.node.take(layer, "kvm.values")
        yield Work("values", self.values, "forward", layer)
        yield from self.node.give(layer, "kvm.values")
        yield from self.node.swap("routes and states to tokens", self.to_tokens)
        yield Work("attend", work.attend + beside.output, "forward", layer)
        yield from place.swap(layer, "feed_forward.shift")
        yield Work("feed-forward", beside.feed_forward, "forward", layer)


def one_of_each_node(programs: Sequence[Program], size: int) -> list[Program]:
    """The first member of every node, as a rank of its own, where members do the same at the same time."""
    return [
        [_among_nodes(step, node, size) for step in program] for node, program in enumerate(programs[::size])
    ]


def _among_nodes(step: Step, node: int, size: int) -> Step:
    if isinstance(step, Send):
        return replace(step, to=step.to // size)
    if isinstance(step, Receive):
        return replace(step, source=step.source // size)
    return step if isinstance(step, Work) else replace(step, members=(node,))


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
        self.size = size
        self.members = tuple(range(node * size, (node + 1) * size))
        self.last = node == len(node_spans) - 1
        self._previous = (node - 1) * size + local if node else None
        self._next = None if self.last else (node + 1) * size + local
        self._before = edge_bytes(model, node_spans[node][0]) if node else {}
        self._after = {} if self.last else edge_bytes(model, node_spans[node + 1][0])

    def swap(self, name: str, seconds: float) -> tuple[Step, ...]:
        return collective(name, seconds, self.members)

    def give(self, layer: int, name: str) -> Iterator[Step]:
        if self._next is not None:
            yield Send(self._next, f"{layer}.{name}", self._after[name] // self.size)

    def take(self, layer: int, name: str) -> Iterator[Step]:
        if self._previous is not None:
            yield Receive(self._previous, f"{layer}.{name}")

    def give_back(self, layer: int, name: str) -> Iterator[Step]:
        if self._previous is not None:
            yield Send(self._previous, f"{layer}.{name}", self._before[name] // self.size)

    def take_back(self, layer: int, name: str) -> Iterator[Step]:
        if self._next is not None:
            yield Receive(self._next, f"{layer}.{name}")


def _forward(place: _Place, layer: int, work: KVMWork, beside: Outside, swap: float) -> Iterator[Step]:
    yield Work("project", beside.project, "forward", layer)
    yield from place.swap("q, k, v to heads", 3 * swap)
    yield from place.give(layer, "kvm.window")
    yield from place.take(layer, "kvm.window")
    yield from place.take(layer, "kvm.keys")
    yield Work("route", work.route, "forward", layer)
    yield from place.give(layer, "kvm.keys")
    yield from place.take(layer, "kvm.values")
    if not place.last:
        yield Work("values", work.values, "forward", layer)
    yield from place.give(layer, "kvm.values")
    yield Work("attend", work.attend, "forward", layer)
    yield from place.swap("outputs to tokens", swap)
    yield Work("feed-forward", beside.output + beside.feed_forward, "forward", layer)


def _backward(place: _Place, layer: int, work: KVMWork, beside: Outside, swap: float) -> Iterator[Step]:
    yield Work("feed-forward", BACKWARD_FACTOR * (beside.feed_forward + beside.output), "backward", layer)
    yield from place.swap("gradients to heads", swap)
    yield Work("attend", work.window_backward, "backward", layer)
    yield from place.give_back(layer, "kvm.window.gradient")
    yield Work("attend", work.state_backward, "backward", layer)
    yield from place.take_back(layer, "kvm.window.gradient")
    yield from place.take_back(layer, "kvm.slots.gradient")
    yield Work("share out", work.share_out, "backward", layer)
    yield from place.give_back(layer, "kvm.slots.gradient")
    yield from place.give_back(layer, "kvm.share")
    yield from place.take_back(layer, "kvm.share")
    yield from place.swap("gradients to tokens", 3 * swap)
    yield Work("project", BACKWARD_FACTOR * beside.project, "backward", layer)
