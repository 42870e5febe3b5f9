"""Messages of KVM where ranks of a node split all of it by heads, from the configuration alone. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from models.config import KVMConfig, ModelConfig
from models.layer_config import Elements
from models.messages import BETWEEN_NODES, EdgeMessage, Phase, Spans, kvm_parts
from models.node_messages import NodeOfRanks, PeerMessage

TO_HEADS, TO_TOKENS = "node.heads", "node.outputs"


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
        yield from self._swap(TO_HEADS, "forward")
        following = self.node.rank + self.node.size
        if following < len(self.node.spans):
            yield from self._handed_over(following, self.node.spans[self.node.members[-1]][1], "forward")
        yield from self._swap(TO_TOKENS, "forward")

    def backward(self) -> Iterator[PeerMessage]:
        yield from self._swap(TO_TOKENS, "backward")
        before = self.node.rank - self.node.size
        if before >= 0:
            yield from self._handed_over(before, self.node.spans[self.node.members[0]][0], "backward")
        yield from self._swap(TO_HEADS, "backward")

    def _swap(self, name: str, phase: Phase) -> Iterator[PeerMessage]:
        """A gradient goes the other way: what a swap gave to heads comes back to tokens."""
        to_heads = (name == TO_HEADS) == (phase == "forward")
        for member in self.node.members:
            if member != self.node.rank:
                holder, owner = (self.node.rank, member) if to_heads else (member, self.node.rank)
                start, stop = self.node.spans[holder]
                numbers = (stop - start) * self._token_numbers(name, self.node.heads(owner))
                label = name if phase == "forward" else f"{name} gradient"
                yield self._to(member, label, phase, Elements(numbers))

    def _token_numbers(self, name: str, state_heads: int) -> int:
        """Of one token and so many heads with a state: queries, keys, values and gates, or outputs."""
        width = self.model.head_width
        queries = state_heads * (self.model.num_heads // self.config.key_value_heads(self.model)) * width
        return queries if name == TO_TOKENS else queries + state_heads * (2 * width + self.config.merge_gate)

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
