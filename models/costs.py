"""What a model costs, from its configuration alone: parameters, FLOPs, bytes sent and kept. No torch."""

from dataclasses import dataclass

from models.config import ModelConfig
from models.layer_config import Elements, MixerCost

SAMPLED_POSITIONS = 64


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
    boundary_bytes: (
        int  # forward, over a shard edge at the end of the context; as many come back as gradients
    )
    decode_state_bytes: int


@dataclass(frozen=True)
class ModelCosts:
    """A model at a sequence length."""

    sequence_length: int
    layers: tuple[LayerCosts, ...]
    embedding_parameters: int
    head_parameters: int
    norm_parameters: int  # of the embedding and the head
    head_token_flops: float

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
    )


def _layer(
    config: ModelConfig, index: int, sequence_length: int, element_bytes: int, mean_flops: float, first: bool
) -> LayerCosts:
    """first: whether no layer before is of the same kind; mean_flops: of the mixer, per token."""
    kind = config.layer_kinds[index]
    layer = config.layer_config(kind)
    cost = layer.cost(config, sequence_length)
    width, shift = config.hidden_size, config.hidden_size * config.token_shift
    feed_forward = 2 * width * config.ffn_width
    norms = 4 * width
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
    )


def _mean_flops(config: ModelConfig, kind: str, sequence_length: int) -> float:
    """The mean over the sequence's tokens, sampled in the middles of equal parts of it."""
    parts = min(SAMPLED_POSITIONS, sequence_length)
    layer = config.layer_config(kind)
    middles = [int((part + 0.5) * sequence_length / parts) + 1 for part in range(parts)]
    costs: list[MixerCost] = [layer.cost(config, min(middle, sequence_length)) for middle in middles]
    return sum(cost.forward_flops for cost in costs) / parts
