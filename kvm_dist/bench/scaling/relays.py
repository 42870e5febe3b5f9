"""Programs of sequence ranks whose layers hand their states from rank to rank.

Steps and messages come in the order of models/kvm and parallel/sequence, which a test compares; bytes are the
closed forms of models/messages.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvm_dist.bench.scaling.cluster import Cluster
from kvm_dist.bench.scaling.program import Program, Receive, Send, Step, Work
from kvm_dist.bench.scaling.work import (
    BACKWARD_FACTOR,
    ELEMENT_BYTES,
    KVMWork,
    Outside,
    kvm_work,
    outside,
    recurrence_seconds,
)
from models.config import ModelConfig
from models.messages import edge_messages

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class RankEdges:
    """Where a rank lies and what its neighbours exchange: name without the layer -> bytes."""

    rank: int
    ranks: int
    before: dict[str, int]  # over the edge to the previous rank
    after: dict[str, int]

    @property
    def last(self) -> bool:
        return self.rank == self.ranks - 1

    @classmethod
    def all(cls, model: ModelConfig, spans: Spans) -> "list[RankEdges]":
        edges: list[dict[str, int]] = [{}, *(edge_bytes(model, start) for start, _ in spans[1:]), {}]
        return [cls(rank, len(spans), edges[rank], edges[rank + 1]) for rank in range(len(spans))]

    def give(self, layer: int, name: str, parts: int = 1) -> Iterator[Step]:
        """Forward; parts: messages that the tensors are spread over."""
        if self.rank < self.ranks - 1 and name in self.after:
            yield Send(self.rank + 1, f"{layer}.{name}", self.after[name] // parts)

    def take(self, layer: int, name: str) -> Iterator[Step]:
        if self.rank and name in self.before:
            yield Receive(self.rank - 1, f"{layer}.{name}")

    def give_back(self, layer: int, name: str, parts: int = 1) -> Iterator[Step]:
        if self.rank and name in self.before:
            yield Send(self.rank - 1, f"{layer}.{name}", self.before[name] // parts)

    def take_back(self, layer: int, name: str) -> Iterator[Step]:
        if self.rank < self.ranks - 1 and name in self.after:
            yield Receive(self.rank + 1, f"{layer}.{name}")

    def swap(self, layer: int, name: str) -> Iterator[Step]:
        """The last tokens to the next rank, those of the previous rank here."""
        yield from self.give(layer, name)
        yield from self.take(layer, name)

    def swap_back(self, layer: int, name: str) -> Iterator[Step]:
        yield from self.give_back(layer, name)
        yield from self.take_back(layer, name)


def edge_bytes(model: ModelConfig, edge: int) -> dict[str, int]:
    """Name without the layer -> bytes over an edge, of a layer that is not the first of its kind."""
    one_of_each = model.model_copy(update={"num_layers": 2})
    return {
        one.name.partition(".")[2]: one.size(ELEMENT_BYTES)
        for one in edge_messages(one_of_each, edge)
        if one.layer == 1
    }


def kvm_relay(cluster: Cluster, model: ModelConfig, spans: Spans, groups: int = 1) -> list[Program]:
    """KVM layers in a wavefront; groups: head groups that S_K, S_V and their gradients are handed over in."""
    total = spans[-1][1]
    programs: list[Program] = []
    for place, span in zip(RankEdges.all(model, spans), spans, strict=True):
        work = kvm_work(cluster, model, span, total, model.num_heads, groups)
        beside = outside(cluster, model, span[1] - span[0])
        steps: list[Step] = []
        for layer in range(model.num_layers):
            steps += _kvm_forward(place, layer, work, beside, groups)
        steps.append(Work("loss", beside.loss))
        for layer in reversed(range(model.num_layers)):
            steps += kvm_backward(place, layer, work, beside, groups)
        programs.append(steps)
    return programs


class Edges(Protocol):
    """What `hand_over` asks of a rank."""

    @property
    def last(self) -> bool: ...

    def give(self, layer: int, name: str, parts: int = 1) -> Iterator[Step]: ...

    def take(self, layer: int, name: str) -> Iterator[Step]: ...


def hand_over(place: Edges, layer: int, work: KVMWork, groups: int) -> Iterator[Step]:
    """Keys routed and handed on, in groups of heads, then values."""
    for _ in range(groups):
        yield from place.take(layer, "kvm.keys")
        yield Work("route", work.route / groups, "forward", layer)
        yield from place.give(layer, "kvm.keys", groups)
    for _ in range(groups):
        yield from place.take(layer, "kvm.values")
        if not place.last:
            yield Work("values", work.values / groups, "forward", layer)
        yield from place.give(layer, "kvm.values", groups)


def _kvm_forward(place: RankEdges, layer: int, work: KVMWork, beside: Outside, groups: int) -> Iterator[Step]:
    yield Work("project", beside.project, "forward", layer)
    yield from place.swap(layer, "kvm.shift")
    yield from place.swap(layer, "kvm.window")
    yield from hand_over(place, layer, work, groups)
    yield Work("attend", work.attend + beside.output, "forward", layer)
    yield from place.swap(layer, "feed_forward.shift")
    yield Work("feed-forward", beside.feed_forward, "forward", layer)


def kvm_backward(place: RankEdges, layer: int, work: KVMWork, beside: Outside, groups: int) -> Iterator[Step]:
    """The gradients of one layer; groups: of heads, in which those of the slots are handed on."""
    yield Work("feed-forward", BACKWARD_FACTOR * beside.feed_forward, "backward", layer)
    yield from place.swap_back(layer, "feed_forward.shift gradient")
    yield Work("attend", BACKWARD_FACTOR * beside.output + work.window_backward, "backward", layer)
    yield from place.give_back(layer, "kvm.window.gradient")
    yield Work("attend", work.state_backward, "backward", layer)
    yield from place.take_back(layer, "kvm.window.gradient")
    for _ in range(groups):
        yield from place.take_back(layer, "kvm.slots.gradient")
        yield Work("share out", work.share_out / groups, "backward", layer)
        yield from place.give_back(layer, "kvm.slots.gradient", groups)
    yield from place.swap_back(layer, "kvm.share")
    yield Work("project", BACKWARD_FACTOR * beside.project, "backward", layer)
    yield from place.swap_back(layer, "kvm.shift gradient")


def rwkv7_relay(cluster: Cluster, model: ModelConfig, spans: Spans) -> list[Program]:
    """Recurrences whose kernel takes the state before and returns the state after."""
    programs: list[Program] = []
    for place, (start, stop) in zip(RankEdges.all(model, spans), spans, strict=True):
        core = recurrence_seconds(cluster, model, stop - start)
        beside = outside(cluster, model, stop - start)
        steps: list[Step] = []
        for layer in range(model.num_layers):
            steps += _rwkv7_forward(place, layer, core, beside)
        steps.append(Work("loss", beside.loss))
        for layer in reversed(range(model.num_layers)):
            steps += _rwkv7_backward(place, layer, core, beside)
        programs.append(steps)
    return programs


def _rwkv7_forward(place: RankEdges, layer: int, core: float, beside: Outside) -> Iterator[Step]:
    yield from place.swap(layer, "rwkv7.shift")
    yield Work("project", beside.project, "forward", layer)
    yield from place.take(layer, "rwkv7.state")
    yield Work("recurrence", core, "forward", layer)
    yield from place.give(layer, "rwkv7.state")
    yield Work("project", beside.output, "forward", layer)
    yield from place.swap(layer, "feed_forward.shift")
    yield Work("feed-forward", beside.feed_forward, "forward", layer)


def _rwkv7_backward(place: RankEdges, layer: int, core: float, beside: Outside) -> Iterator[Step]:
    yield Work("feed-forward", BACKWARD_FACTOR * beside.feed_forward, "backward", layer)
    yield from place.swap_back(layer, "feed_forward.shift gradient")
    yield Work("project", BACKWARD_FACTOR * beside.output, "backward", layer)
    yield from place.take_back(layer, "rwkv7.state gradient")
    yield Work("recurrence", BACKWARD_FACTOR * core, "backward", layer)
    yield from place.give_back(layer, "rwkv7.state gradient")
    yield Work("project", BACKWARD_FACTOR * beside.project, "backward", layer)
    yield from place.swap_back(layer, "rwkv7.shift gradient")
