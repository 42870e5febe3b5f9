"""What a model costs, from its configuration alone: parameters, FLOPs, bytes sent and kept. No torch."""

from collections import Counter
from dataclasses import dataclass

from models.config import ModelConfig
from models.layer_config import Elements, MixerCost

SAMPLED_POSITIONS = 64
MOST_COUNTED_BLOCKS = 2048


@dataclass(frozen=True)
class LayerCosts:
    """One layer, mixer and feed-forward part together. Bytes are for one sequence.

    FLOPs count a multiplication and an addition as two, of projections, reads and states; norms and
    activations are left out. The last token is the one at the end of the context.
    """

    index: int
    kind: str
    parameters: int
    last_token_flops: float
    mean_token_flops: float
    boundary_bytes: int  # forward, over a shard edge at the end of the context
    decode_state_bytes: int
    saved_token_bytes: int  # kept for the backward of the last token
    recomputed_token_bytes: int  # kept besides while activations of this layer are computed again


@dataclass(frozen=True)
class ModelCosts:
    """A model at a sequence length."""

    sequence_length: int
    layers: tuple[LayerCosts, ...]
    embedding_parameters: int
    head_parameters: int
    norm_parameters: int  # of the embedding and the head
    head_token_flops: float
    outside_saved_token_bytes: (
        int  # of the embedding, of the values that all layers of a kind share, the head
    )

    @property
    def parameters(self) -> int:
        outside = self.embedding_parameters + self.head_parameters + self.norm_parameters
        return outside + sum(layer.parameters for layer in self.layers)

    @property
    def last_token_flops(self) -> float:
        return self.head_token_flops + sum(layer.last_token_flops for layer in self.layers)

    @property
    def mean_token_flops(self) -> float:
        """Of a forward over the sequence, per token; a backward costs twice as much again."""
        return self.head_token_flops + sum(layer.mean_token_flops for layer in self.layers)

    @property
    def boundary_bytes(self) -> int:
        return sum(layer.boundary_bytes for layer in self.layers)

    @property
    def saved_token_bytes(self) -> int:
        """Kept for the backward of a token between the forward and the backward, the loss left out."""
        return self.outside_saved_token_bytes + sum(layer.saved_token_bytes for layer in self.layers)

    @property
    def decode_state_bytes(self) -> int:
        return sum(layer.decode_state_bytes for layer in self.layers)


def model_costs(config: ModelConfig, sequence_length: int, element_bytes: int = 4) -> ModelCosts:
    """Costs at `sequence_length` tokens of context, numbers of the model's dtype taking `element_bytes`."""
    if sequence_length < 1:
        raise ValueError(f"sequence_length={sequence_length}: want at least 1")
    kinds = config.layer_kinds
    mean_flops = {kind: _mean_flops(config, kind, sequence_length) for kind in set(kinds)}
    rows = [
        _layer(
            config, index, sequence_length, element_bytes, mean_flops[kind], first=kinds.index(kind) == index
        )
        for index, kind in enumerate(kinds)
    ]
    return ModelCosts(
        sequence_length=sequence_length,
        layers=tuple(rows),
        embedding_parameters=config.vocab_size * config.hidden_size,
        head_parameters=config.vocab_size * config.hidden_size,
        norm_parameters=4 * config.hidden_size,
        head_token_flops=2 * config.vocab_size * config.hidden_size,
        outside_saved_token_bytes=(4 + len(set(kinds))) * config.hidden_size * element_bytes + 24,
    )


def block_flops(config: ModelConfig, blocks: int, block: int, ranks: int = 1) -> list[int]:
    """Forward FLOPs of each of the first `blocks` blocks of `block` tokens of a sequence on `ranks` ranks.

    Whole numbers, so that sums of them do not depend on their order or on the machine. Of a long sequence
    only some blocks are counted, and each stands for those around it.
    """
    stride = -(-blocks // MOST_COUNTED_BLOCKS)
    kinds = Counter(config.layer_kinds)
    outside = 2 * config.vocab_size * config.hidden_size
    outside += config.num_layers * 4 * config.hidden_size * config.ffn_width
    shared = ranks > 1 and config.num_heads % ranks == 0  # reads that ranks share by heads cost all the same
    counted: list[int] = []
    for first in range(0, blocks, stride):
        middle = int((first + min(first + stride, blocks)) * block / 2) + 1
        mixers = 0
        for kind, number in kinds.items():
            layer = config.layer_config(kind)
            position = blocks * block // 2 if shared and layer.reads_by_heads else middle
            mixers += number * int(layer.cost(config, position).forward_flops)
        counted.append(block * (outside + mixers))
    return [counted[index // stride] for index in range(blocks)]


def _layer(
    config: ModelConfig, index: int, sequence_length: int, element_bytes: int, mean_flops: float, first: bool
) -> LayerCosts:
    """first: whether no layer before is of the same kind; mean_flops: of the mixer, per token."""
    kind = config.layer_kinds[index]
    layer = config.layer_config(kind)
    cost = layer.cost(config, sequence_length)
    width, shift = config.hidden_size, config.hidden_size * config.shifts_feed_forward
    feed_forward = 2 * width * config.ffn_width
    norms = 4 * width
    plain = config.model_copy(update={"activation_checkpointing": False})
    saved = _saved_bytes(config, kind, sequence_length, element_bytes)
    boundary = cost.boundary + Elements(shift)
    if first:
        boundary += cost.first_boundary
    return LayerCosts(
        index=index,
        kind=kind,
        parameters=cost.parameters + feed_forward + shift + norms,
        last_token_flops=cost.forward_flops + 2 * feed_forward,
        mean_token_flops=mean_flops + 2 * feed_forward,
        boundary_bytes=boundary.size(element_bytes),
        decode_state_bytes=(cost.decode_state + Elements(shift)).size(element_bytes),
        saved_token_bytes=saved,
        recomputed_token_bytes=_saved_bytes(plain, kind, sequence_length, element_bytes) - saved,
    )


def _saved_bytes(config: ModelConfig, kind: str, sequence_length: int, element_bytes: int) -> int:
    """By a whole layer: its mixer's share; inputs and moments of two norms; the feed-forward part's input,
    shifts and two inner widths, or its input alone if the rest is computed again."""
    width, inner = config.hidden_size, config.ffn_width
    shifted = width * config.shifts_feed_forward
    feed_forward = width if config.activation_checkpointing else width + shifted + 2 * inner
    mixer = config.layer_config(kind).cost(config, sequence_length).saved
    return (mixer + Elements(2 * width + feed_forward, 4)).size(element_bytes)


def _mean_flops(config: ModelConfig, kind: str, sequence_length: int) -> float:
    """The mean over the sequence's tokens, sampled in the middles of equal parts of it."""
    parts = min(SAMPLED_POSITIONS, sequence_length)
    layer = config.layer_config(kind)
    middles = [int((part + 0.5) * sequence_length / parts) + 1 for part in range(parts)]
    costs: list[MixerCost] = [layer.cost(config, min(middle, sequence_length)) for middle in middles]
    return sum(cost.forward_flops for cost in costs) / parts
