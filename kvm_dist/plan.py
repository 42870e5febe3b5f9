"""What a run will cost, from its configuration alone: no GPU, no data, no torch."""

from dataclasses import dataclass

from kvm_dist.config import RunConfig
from models.config import ModelConfig
from models.costs import ModelCosts, model_costs
from models.layer_config import Elements
from parallel.config import ParallelConfig
from parallel.sequence.shard import equal_shards

# Saved for the backward per token and layer beside the feed-forward part, in hidden widths: measured, without
# and with activation checkpointing. Kinds that are not listed save about as much as attention does.
SAVED_WIDTHS = {"rwkv7": (60.0, 20.0), "ovq": (26.0, 24.0)}
SAVED_WIDTHS_DEFAULT = (18.0, 16.0)
FEED_FORWARD_SAVES = 3  # its inner width: before the activation, after it, squared


@dataclass(frozen=True)
class LayerPlan:
    """One layer. boundary_bytes: sent on at each shard edge, per micro-batch, forward; first edge first."""

    index: int
    kind: str
    parameters: int
    train_flops_per_token: float
    state_bytes: int  # of one sequence at its end, to go on by one token
    boundary_bytes: tuple[int, ...]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank. activations and state are estimates; buffers of the allocator come on top."""

    weights: int
    masters_and_moments: int
    gradients: int
    activations: int
    state: int

    @property
    def total(self) -> int:
        return self.weights + self.masters_and_moments + self.gradients + self.activations + self.state


@dataclass(frozen=True)
class Plan:
    """A run in numbers. eta_seconds: None without a throughput."""

    name: str
    ranks: int
    parameters: int
    embedding_parameters: int
    head_parameters: int
    parameters_by_kind: dict[str, int]
    layers: tuple[LayerPlan, ...]
    memory: MemoryPlan
    train_flops_per_token: float
    decode_flops_per_token: float
    tokens_per_step: int
    steps: int
    tokens: int
    train_flops: float
    sequences_per_micro_batch: int  # of one rank
    tokens_per_rank: int  # of one micro-batch
    checkpoint_bytes: int
    checkpoints_kept_bytes: int
    eta_seconds: float | None


def make_plan(config: RunConfig, tokens_per_second: float | None = None) -> Plan:
    """Count what `config` asks for. tokens_per_second: of the whole run, for the time it takes."""
    element_bytes = _element_bytes(config.parallel)
    costs = model_costs(config.model, config.data.sequence_length, element_bytes)
    tokens_per_step = config.train.batch_sequences * config.data.sequence_length
    sequences = config.train.batch_sequences // (config.parallel.data * config.train.accumulation)
    tokens_per_rank = sequences * config.data.sequence_length // config.parallel.sequence
    tokens = tokens_per_step * config.train.steps
    flops = _train_factor(config.model) * costs.mean_token_flops
    checkpoint = costs.parameters * (8 + (4 if element_bytes == 4 else 4 + element_bytes))
    return Plan(
        name=config.name,
        ranks=config.parallel.world_size,
        parameters=costs.parameters,
        embedding_parameters=costs.embedding_parameters,
        head_parameters=costs.head_parameters,
        parameters_by_kind=_by_kind(costs),
        layers=_layers(config, costs, sequences),
        memory=_memory(config, costs, sequences, tokens_per_rank),
        train_flops_per_token=flops,
        decode_flops_per_token=costs.last_token_flops,
        tokens_per_step=tokens_per_step,
        steps=config.train.steps,
        tokens=tokens,
        train_flops=flops * tokens,
        sequences_per_micro_batch=sequences,
        tokens_per_rank=tokens_per_rank,
        checkpoint_bytes=checkpoint,
        checkpoints_kept_bytes=checkpoint * min(config.checkpoint.keep, _saves(config)),
        eta_seconds=tokens / tokens_per_second if tokens_per_second else None,
    )


def _element_bytes(parallel: ParallelConfig) -> int:
    return 2 if parallel.precision == "bfloat16" else 4


def _train_factor(model: ModelConfig) -> int:
    """Forwards that a forward and a backward are worth; a recomputed forward is one more."""
    return 4 if model.activation_checkpointing else 3


def _saves(config: RunConfig) -> int:
    return -(-config.train.steps // config.checkpoint.every_steps)


def _by_kind(costs: ModelCosts) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for layer in costs.layers:
        kinds[layer.kind] = kinds.get(layer.kind, 0) + layer.parameters
    return kinds


def _layers(config: RunConfig, costs: ModelCosts, sequences: int) -> tuple[LayerPlan, ...]:
    """Layers of one kind send alike, but for the first of them."""
    edges = _edges(config)
    factor = _train_factor(config.model)
    firsts = {layer.kind: layer.index for layer in reversed(costs.layers)}
    sent = {
        (kind, first): tuple(sequences * _boundary_bytes(config, kind, edge, first) for edge in edges)
        for kind in firsts
        for first in (True, False)
    }
    return tuple(
        LayerPlan(
            layer.index,
            layer.kind,
            layer.parameters,
            factor * layer.mean_token_flops,
            layer.decode_state_bytes,
            sent[layer.kind, firsts[layer.kind] == layer.index],
        )
        for layer in costs.layers
    )


def _edges(config: RunConfig) -> list[int]:
    """Positions at which one rank's tokens end and the next one's begin."""
    if config.parallel.sequence == 1:
        return []
    shards = equal_shards(
        config.data.sequence_length, config.parallel.sequence, config.model.position_multiple
    )
    return [start for start, _ in shards[1:]]


def _boundary_bytes(config: RunConfig, kind: str, edge: int, first: bool) -> int:
    """Sent on for one sequence by one layer: its mixer and the token shift of its feed-forward part."""
    cost = config.model.layer_config(kind).cost(config.model, edge)
    shift = Elements(config.model.hidden_size * config.model.token_shift)
    handed = cost.boundary + shift + (cost.first_boundary if first else Elements())
    return handed.size(_element_bytes(config.parallel))


def _memory(config: RunConfig, costs: ModelCosts, sequences: int, tokens_per_rank: int) -> MemoryPlan:
    parallel, count = config.parallel, costs.parameters
    element_bytes, stage = _element_bytes(parallel), parallel.zero_stage
    shared = parallel.world_size
    masters = 0 if stage == 0 else 4 * count  # stage 0 updates the float32 weights themselves
    return MemoryPlan(
        weights=element_bytes * count // (shared if stage == 3 else 1),
        masters_and_moments=(masters + 8 * count) // (shared if stage else 1),
        gradients=4 * count // (shared if stage >= 2 else 1),
        activations=int(tokens_per_rank * _saved_bytes_per_token(config.model, element_bytes)),
        state=sequences * costs.boundary_bytes,
    )


def _saved_bytes_per_token(model: ModelConfig, element_bytes: int) -> float:
    """What the backward needs of one token, the float32 logits and their gradient included."""
    recomputes = model.activation_checkpointing
    saved = 0.0
    for kind in model.layer_kinds:
        saved += SAVED_WIDTHS.get(kind, SAVED_WIDTHS_DEFAULT)[recomputes] * model.hidden_size
        saved += 0 if recomputes else FEED_FORWARD_SAVES * model.ffn_width
    return saved * element_bytes + 8 * model.vocab_size
