"""Messages of KVM where ranks of a node split routing by heads, from the configuration alone. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from models.config import KVMConfig, ModelConfig
from models.layer_config import Elements
from models.messages import EdgeMessage, Spans


@dataclass(frozen=True)
class PeerMessage:
    """One message of one forward between two sequence ranks; backwards, gradients go from edge to edge."""

    to: int
    message: EdgeMessage


def node_messages(
    model: ModelConfig, spans: Spans, size: int, rank: int, route_numbers: int = 1
) -> tuple[PeerMessage, ...]:
    """What `rank` sends to peers in one forward, in the order sent, in nodes of `size` ranks.

    route_numbers: int32 numbers of a folded token's route: 1 of the torch backend, 2 of Triton's. What goes
    over the edges besides is in `edge_messages`.
    """
    layers = [(index, model.layer_config(kind)) for index, kind in enumerate(model.layer_kinds)]
    return tuple(
        PeerMessage(to, EdgeMessage(index, f"{index}.kvm.{name}", "forward", elements))
        for index, config in layers
        if isinstance(config, KVMConfig)
        for to, name, elements in _of_layer(
            model, config, NodeOfRanks(spans, size, rank, config.key_value_heads(model)), route_numbers
        )
    )


@dataclass(frozen=True)
class NodeOfRanks:
    spans: Spans
    size: int
    rank: int
    all_heads: int  # that have keys, values and a state

    @property
    def members(self) -> range:
        first = self.rank - self.rank % self.size
        return range(first, first + self.size)

    def heads(self, member: int) -> int:
        """How many the member routes."""
        place = member % self.size
        return self.all_heads * (place + 1) // self.size - self.all_heads * place // self.size


def _of_layer(
    model: ModelConfig, config: KVMConfig, node: NodeOfRanks, route_numbers: int
) -> Iterator[tuple[int, str, Elements]]:
    width = model.head_width
    others = [member for member in node.members if member != node.rank]
    own = _folded(config, node, node.rank)
    for member in others:
        numbers = (own[1] - own[0]) * node.heads(member) * (2 * width + config.merge_gate)
        yield member, "node.tokens", Elements(numbers)
    heads, following = node.heads(node.rank), node.rank + node.size
    if following < len(node.spans):
        slots = config.slots_covering(_folded(config, node, node.members[-1])[1])
        yield following, "keys", Elements(float32=heads * slots * width)
        yield following, "values", Elements(float32=heads * slots * (width + 1))
    for member in others:
        start, stop = _folded(config, node, member)
        numbers = route_numbers * (stop - start) + config.slots_covering(start) * (2 * width + 1)
        yield member, "node.routes", Elements(float32=heads * numbers)


def _folded(config: KVMConfig, node: NodeOfRanks, rank: int) -> tuple[int, int]:
    """The tokens that a rank folds: up to where the next rank's first block reads the window, or its own
    last block."""
    start, stop = node.spans[rank]
    halo, last = (config.window_chunks - 1) * config.chunk, rank == len(node.spans) - 1
    block_stop = -(-stop // config.chunk) * config.chunk - config.chunk * last
    return max(min(start, config.chunk), start - halo), max(min(stop, config.chunk), block_stop - halo)
