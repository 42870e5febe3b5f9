"""Bytes that ranks send each other for one sequence, from the configuration alone. No torch."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvm_dist.config import RunConfig
from models.messages import EdgeMessage, Phase, Spans, edge_messages, head_swaps
from models.node_messages import node_messages
from models.operator_messages import operator_messages
from parallel.config import ParallelConfig

_ROUTES = (
    "node.routes"  # a state of some of the heads, as its receiver would have had it from the rank before
)


class _Sent(NamedTuple):
    """edge: number of the shard that ends where the message passes; None between ranks of one node."""

    source: int
    to: int
    edge: int | None
    message: EdgeMessage


@dataclass
class Traffic:
    """Of one sequence, a forward and a backward of all layers.

    over_edges: by (layer, phase, number of the shard before the edge); ranks of a node that hand over as one
    count together, at the node's end. swapped: by (layer, rank), to others of the node or, where ranks take
    turns with the heads of full attention, to all. sent: by rank, of messages whose copies are kept until the
    next micro-batch ends; swaps keep none. received: by rank, states kept for the backward.
    """

    over_edges: Counter[tuple[int, Phase, int]] = field(default_factory=Counter)
    swapped: Counter[tuple[int, int]] = field(default_factory=Counter)
    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)


def traffic(config: RunConfig, spans: Spans) -> Traffic:
    """spans: of every sequence rank."""
    counted = Traffic()
    for source, to, edge, message in _messages(config, spans):
        size = message.size(element_bytes(config.parallel))
        if edge is None:
            counted.swapped[message.layer, source] += size
        else:
            counted.sent[source] += size
            counted.over_edges[message.layer, message.phase, edge] += size
        if message.phase == "forward" and (edge is not None or message.name.endswith(_ROUTES)):
            counted.received[to] += size
    for rank in range(len(spans)) if len(spans) > 1 else ():
        for message in head_swaps(config.model, spans, rank):
            counted.swapped[message.layer, rank] += message.size(element_bytes(config.parallel))
    return counted


def element_bytes(parallel: ParallelConfig) -> int:
    """Of one number in the model's dtype."""
    return 2 if parallel.precision == "bfloat16" else 4


def _messages(config: RunConfig, spans: Spans) -> Iterator[_Sent]:
    model, parallel = config.model, config.parallel
    size, splits = parallel.head_parallel, parallel.node_splits
    for rank, (_, stop) in enumerate(spans[:-1]):
        for one in edge_messages(model, stop, spans, parallel.head_groups, size, splits):
            ends = (rank, rank + 1) if one.phase == "forward" else (rank + 1, rank)
            yield _Sent(*ends, rank, one)
    for rank in range(len(spans)) if size > 1 else ():
        between = (
            operator_messages(model, spans, size, rank, parallel.head_groups)
            if splits == "operator"
            else node_messages(model, spans, size, rank)
        )
        for peer in between:
            first_node = min(rank, peer.to) // size
            edge = None if rank // size == peer.to // size else (first_node + 1) * size - 1
            yield _Sent(rank, peer.to, edge, peer.message)
