"""Messages of KVM where ranks of a node split all of it by heads, from the configuration alone. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from models.config import KVMConfig, ModelConfig
from models.layer_config import Elements
from models.messages import BETWEEN_NODES, EdgeMessage, Phase, Spans, kvm_parts
from models.node_messages import NodeOfRanks, PeerMessage

OUTPUTS = "node.outputs"


def operator_messages(
    model: ModelConfig, spans: Spans, size: int, rank: int, head_groups: int = 1
) -> tuple[PeerMessage, ...]:
    """What `rank` sends to peers in one forward and backward, in the order sent, in nodes of `size` ranks.

    head_groups: of a member's own heads. What goes over the edges besides is in `edge_messages`.
    """
    layers = [
        _Layer(
            model, index, config, NodeOfRanks(spans, size, rank, config.key_value_heads(model)), head_groups
        )
        for index, kind in enumerate(model.layer_kinds)
        if isinstance(config := model.layer_config(kind), KVMConfig)
    ]
    forward = [one for layer in layers for one in layer.forward()]
    return (*forward, *(one for layer in reversed(layers) for one in layer.backward()))


@dataclass(frozen=True)
class _Layer:
    model: ModelConfig
    index: int
    config: KVMConfig
    node: NodeOfRanks
    head_groups: int

    def forward(self) -> Iterator[PeerMessage]:
        for name in ("gate", "key", "value", "query"):
            yield from self._to_heads(f"node.{name}", self._head_numbers(name), "forward")
        following = self.node.rank + self.node.size
        if following < len(self.node.spans):
            yield from self._handed_over(following, self.node.spans[self.node.members[-1]][1], "forward")
        yield from self._to_tokens(OUTPUTS, self._head_numbers("query"), "forward")

    def backward(self) -> Iterator[PeerMessage]:
        yield from self._to_heads(f"{OUTPUTS} gradient", self._head_numbers("query"), "backward")
        before = self.node.rank - self.node.size
        start = self.node.spans[self.node.members[0]][0]
        handed_over = list(self._handed_over(before, start, "backward")) if before >= 0 else []
        yield from handed_over[:1]  # of the window; after it those of queries are complete
        yield from self._to_tokens("node.query gradient", self._head_numbers("query"), "backward")
        yield from handed_over[1:]
        for name in ("value", "key", "gate"):
            yield from self._to_tokens(f"node.{name} gradient", self._head_numbers(name), "backward")

    def _to_heads(self, name: str, numbers: int, phase: Phase) -> Iterator[PeerMessage]:
        """This rank's tokens. numbers: of one token and one head with a state."""
        start, stop = self.node.spans[self.node.rank]
        for member in self._others(numbers):
            yield self._to(member, name, phase, Elements((stop - start) * self.node.heads(member) * numbers))

    def _to_tokens(self, name: str, numbers: int, phase: Phase) -> Iterator[PeerMessage]:
        """This rank's heads."""
        heads = self.node.heads(self.node.rank)
        for member in self._others(numbers):
            start, stop = self.node.spans[member]
            yield self._to(member, name, phase, Elements((stop - start) * heads * numbers))

    def _others(self, numbers: int) -> Iterator[int]:
        return (member for member in self.node.members if member != self.node.rank and numbers)

    def _head_numbers(self, name: str) -> int:
        """Of one token and one head with a state: of its queries, key, value or gate."""
        if name == "gate":
            return int(self.config.merge_gate)
        group = self.model.num_heads // self.config.key_value_heads(self.model)
        return self.model.head_width * (group if name == "query" else 1)

    def _handed_over(self, to: int, edge: int, phase: Phase) -> Iterator[PeerMessage]:
        """What one rank hands to the next, of this member's heads alone."""
        heads = self.node.heads(self.node.rank)
        group = self.model.num_heads // self.config.key_value_heads(self.model)
        config = self.config.model_copy(update={"kv_heads": heads})
        changed: dict[str, Any] = {"num_heads": heads * group, "head_dim": self.model.head_width}
        model = self.model.model_copy(update=changed)
        forward, backward = kvm_parts(model, config, config.cost(model, edge).boundary, self.head_groups)
        for part, elements in forward if phase == "forward" else backward:
            if part in BETWEEN_NODES:
                yield self._to(to, part, phase, elements)

    def _to(self, rank: int, part: str, phase: Phase, elements: Elements) -> PeerMessage:
        return PeerMessage(rank, EdgeMessage(self.index, f"{self.index}.kvm.{part}", phase, elements))
