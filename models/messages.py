"""Every message over one shard edge, from the configuration alone: names, order, bytes. Imports no torch.

Forward messages are the parts of what a kind states as its cost's `boundary`; the sums agree. Backward
messages follow from them, but for KVM, which sends sums in the dtype it accumulates in, and those of its
window twice: once what windows read, once what the slots owe to the window's tokens. Full attention alone
asks for more than the edge: over it goes a message for every rank before, or none where ranks swap heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from models.config import (
    BlockWindowConfig,
    FullAttentionConfig,
    KVMConfig,
    LayerConfig,
    ModelConfig,
    OVQConfig,
    RWKV7Config,
    SlidingWindowConfig,
)
from models.kinds.attention import shift_elements, window_elements
from models.kinds.recurrence import RecurrenceConfig
from models.layer_config import Elements
from parallel.config import NodeSplits

Phase = Literal["forward", "backward"]
# Of KVM, what goes from node to node where ranks split routing, or all of the operator, by heads.
ROUTED_BETWEEN_NODES = ("keys", "values")
BETWEEN_NODES = (*ROUTED_BETWEEN_NODES, "window", "window.gradient", "slots.gradient", "share")


@dataclass(frozen=True)
class EdgeMessage:
    """One message of one sequence; in the backward it goes from the later rank to the earlier one.

    Of a swap, what one rank sends to all others.
    """

    layer: int
    name: str
    phase: Phase
    elements: Elements

    def size(self, element_bytes: int, sequences: int = 1) -> int:
        """Bytes, with `element_bytes` for one number of the model's dtype."""
        return sequences * self.elements.size(element_bytes)


Spans = Sequence[tuple[int, int]]  # [start, stop) of every rank
Part = tuple[str, Elements]
Parts = tuple[list[Part], list[Part]]  # forward and backward, each in the order sent


def edge_messages(
    model: ModelConfig,
    edge: int,
    spans: Spans = (),
    head_groups: int = 1,
    head_parallel: int = 1,
    node_splits: NodeSplits = "operator",
) -> tuple[EdgeMessage, ...]:
    """What one forward and backward send over a shard edge at position `edge`, in the order sent.

    Recomputed activations send nothing again. spans: of all ranks, for models with full attention.
    head_groups: in which states of KVM are handed over. head_parallel: ranks of a node; if more than one,
    what `node_splits` says goes between nodes, see `node_messages` and `operator_messages`.
    """
    layers = [
        list(_layer_messages(model, index, edge, spans, head_groups)) for index in range(model.num_layers)
    ]
    forward = [one for layer in layers for one in layer if one.phase == "forward"]
    backward = [one for layer in reversed(layers) for one in layer if one.phase == "backward"]
    if head_parallel > 1:
        parts = BETWEEN_NODES if node_splits == "operator" else ROUTED_BETWEEN_NODES
        names = tuple(f".kvm.{part}" for part in parts)
        return tuple(one for one in (*forward, *backward) if not one.name.endswith(names))
    return (*forward, *backward)


def head_swaps(model: ModelConfig, spans: Spans, rank: int) -> tuple[EdgeMessage, ...]:
    """What `rank` sends to all others together in the swaps of full attention, in the order sent.

    Nothing where the ranks do not divide the heads.
    """
    if not swaps_heads(model, spans):
        return ()
    tokens, own = spans[-1][1], spans[rank][1] - spans[rank][0]
    row = model.num_heads * model.head_width
    inward = own * row * (len(spans) - 1) // len(spans)  # the other ranks' heads of its own tokens
    outward = (tokens - own) * row // len(spans)  # its own heads of the others' tokens
    layers = [index for index in range(model.num_layers) if _is_full_attention(model, index)]
    forward = (("window.heads", 3 * inward), ("window.tokens", outward))
    backward = (("window.tokens gradient", inward), ("window.heads gradient", 3 * outward))
    return (
        *(_swap(model, index, "forward", *swap) for index in layers for swap in forward),
        *(_swap(model, index, "backward", *swap) for index in reversed(layers) for swap in backward),
    )


def _is_full_attention(model: ModelConfig, index: int) -> bool:
    return isinstance(model.layer_config(model.layer_kinds[index]), FullAttentionConfig)


def _swap(model: ModelConfig, index: int, phase: Phase, name: str, elements: int) -> EdgeMessage:
    return EdgeMessage(index, f"{index}.{model.layer_kinds[index]}.{name}", phase, Elements(elements))


def swaps_heads(model: ModelConfig, spans: Spans) -> bool:
    """Whether each rank takes some heads of full attention; else keys and values go from rank to rank."""
    return len(spans) > 0 and model.num_heads % len(spans) == 0


def _layer_messages(
    model: ModelConfig, index: int, edge: int, spans: Spans, head_groups: int
) -> Iterator[EdgeMessage]:
    kind = model.layer_kinds[index]
    config = model.layer_config(kind)
    forward, backward = _parts(model, config, edge, spans, head_groups)
    first = config.cost(model, edge).first_boundary
    if first != Elements() and model.layer_kinds.index(kind) == index:
        forward = [("first_shift", first), *forward]
        backward = [*backward, ("first_shift gradient", first)]
    feed_forward = _halo("shift", model.hidden_size * model.shifts_feed_forward)
    for part, elements in forward:
        yield EdgeMessage(index, f"{index}.{kind}.{part}", "forward", elements)
    for part, elements in feed_forward:
        yield EdgeMessage(index, f"{index}.feed_forward.{part}", "forward", elements)
    for part, elements in _gradients(feed_forward):
        yield EdgeMessage(index, f"{index}.feed_forward.{part}", "backward", elements)
    for part, elements in backward:
        yield EdgeMessage(index, f"{index}.{kind}.{part}", "backward", elements)


def _parts(model: ModelConfig, config: LayerConfig, edge: int, spans: Spans, head_groups: int) -> Parts:
    """The mixer's messages: its cost's boundary in parts."""
    boundary = config.cost(model, edge).boundary
    if isinstance(config, KVMConfig):
        return kvm_parts(model, config, boundary, head_groups)
    if isinstance(config, OVQConfig):
        return _ovq(model, boundary)
    if isinstance(config, RWKV7Config):
        shift = _halo("shift", boundary.model_dtype)
        return _answered([*shift, ("state", Elements(float32=boundary.float32))])
    if isinstance(config, RecurrenceConfig):
        tokens = _halo("convolution", boundary.model_dtype)
        return _answered([*tokens, ("state", Elements(float32=boundary.float32))])
    shifted = shift_elements(model)
    shift = _halo("shift", shifted)
    if isinstance(config, SlidingWindowConfig):
        return _answered([*shift, *_halo("window", boundary.model_dtype - shifted)])
    if isinstance(config, BlockWindowConfig):
        sinks = window_elements(model, min(config.sinks, edge))
        window = _halo("window", boundary.model_dtype - shifted - sinks)
        return _answered([*shift, *window, *_halo("sinks", sinks)])
    if isinstance(config, FullAttentionConfig):
        return _full_attention(model, edge, spans)
    return _answered([("state", boundary)])  # a kind that is not listed: in one message


def kvm_parts(model: ModelConfig, config: KVMConfig, boundary: Elements, head_groups: int) -> Parts:
    heads, width = config.key_value_heads(model), model.head_width
    shift = shift_elements(model, heads)
    slots = boundary.float32 // (heads * (2 * width + 1))
    window = boundary.model_dtype - shift
    tokens = window // (heads * (2 * width + config.merge_gate))
    groups = [heads * (one + 1) // head_groups - heads * one // head_groups for one in range(head_groups)]
    forward = [
        *_halo("shift", shift),
        *_halo("window", window),
        *(("keys", Elements(float32=group * slots * width)) for group in groups),
        *(("values", Elements(float32=group * slots * (width + 1))) for group in groups),
    ]
    backward = [
        *_halo("window.gradient", float32=window_elements(model, tokens, heads)),
        *(("slots.gradient", Elements(float32=group * slots * (2 * width + 1))) for group in groups),
        *_halo("share", float32=window),
        *_halo("shift gradient", shift),
    ]
    return forward, backward


def _ovq(model: ModelConfig, boundary: Elements) -> Parts:
    """Counts take four bytes each and have no gradient."""
    width, shift = model.head_width, _halo("shift", boundary.model_dtype)
    means = boundary.float32 // (2 * width + 1) * (2 * width)
    backward = _gradients([*shift, ("centroids", Elements(float32=means))])
    return [*shift, ("centroids", Elements(float32=boundary.float32))], backward


def _full_attention(model: ModelConfig, edge: int, spans: Spans) -> Parts:
    """Keys and values of every rank before, the nearest first; gradients of the farthest come back first."""
    before = [stop - start for start, stop in spans if stop <= edge]
    if sum(before) != edge or not before:
        raise ValueError(f"full attention over an edge at {edge} needs the spans of all ranks; got {spans}")
    if swaps_heads(model, spans):
        before = []
    shift = _halo("shift", shift_elements(model))
    pairs = [window_elements(model, tokens) for tokens in before]
    forward = [*shift, *(("window", Elements(pair)) for pair in reversed(pairs))]
    backward = [("window gradient", Elements(float32=pair)) for pair in pairs]
    return forward, [*backward, *_gradients(shift)]


def _answered(forward: list[Part]) -> Parts:
    return forward, _gradients(forward)


def _gradients(forward: list[Part]) -> list[Part]:
    """As many numbers back, those of the last message first."""
    return [(f"{name} gradient", elements) for name, elements in reversed(forward)]


def _halo(name: str, model_dtype: int = 0, float32: int = 0) -> list[Part]:
    """Tokens at the edge; a halo of none is not sent, a state of no slots is."""
    return [(name, Elements(model_dtype, float32))] if model_dtype + float32 else []
