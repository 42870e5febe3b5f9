"""What a run will cost, from its configuration alone: no GPU, no data, no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvm_dist.config import RunConfig
from kvm_dist.plan_memory import MemoryPlan, rank_memory
from kvm_dist.plan_messages import Traffic, element_bytes, traffic
from models.config import ModelConfig
from models.costs import ModelCosts, model_costs
from models.messages import Phase
from models.sequence_shards import SequenceShards


@dataclass(frozen=True)
class LayerPlan:
    """One layer. Bytes sent of a micro-batch: boundary over each shard edge in the forward, returned in the
    backward, first edge first; swapped by each rank to others in both, where ranks share the work by heads.
    """

    index: int
    kind: str
    parameters: int
    train_flops_per_token: float
    state_bytes: int  # of one sequence at its end, to go on by one token
    boundary_bytes: tuple[int, ...]
    returned_bytes: tuple[int, ...]
    swapped_bytes: tuple[int, ...]


@dataclass(frozen=True)
class ShardPlan:
    """What one sequence rank holds of a sequence. cost: its share of the modelled FLOPs, 1 for all ranks."""

    tokens: int
    cost: float
    memory: MemoryPlan


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
    shards: tuple[ShardPlan, ...]  # of the sequence ranks, first tokens first
    imbalance: float  # how much longer than the mean the dearest of them computes
    memory: MemoryPlan  # of the fullest rank
    train_flops_per_token: float
    decode_flops_per_token: float
    tokens_per_step: int
    steps: int
    tokens: int
    train_flops: float
    sequences_per_micro_batch: int  # of one rank
    tokens_per_rank: int  # of one micro-batch, at most
    padded_tokens: int  # at the end of a sequence, to whole blocks
    checkpoint_bytes: int
    checkpoints_kept_bytes: int
    eta_seconds: float | None


def make_plan(config: RunConfig, tokens_per_second: float | None = None) -> Plan:
    """Count what `config` asks for. tokens_per_second: of the whole run, for the time it takes."""
    width = element_bytes(config.parallel)
    costs = model_costs(config.model, config.data.sequence_length, width)
    shards = config.shards
    sequences = config.train.batch_sequences // (config.parallel.data * config.train.accumulation)
    sent = traffic(config, shards.spans)
    shard_plans = tuple(_shard_plans(config, costs, shards, sent, sequences))
    tokens_per_step = config.train.batch_sequences * config.data.sequence_length
    tokens = tokens_per_step * config.train.steps
    flops = _train_factor(config.model) * costs.mean_token_flops
    if config.train.loss_chunk is not None:
        flops += costs.head_token_flops
    checkpoint = costs.parameters * (8 + (4 if width == 4 else 4 + width))
    return Plan(
        name=config.name,
        ranks=config.parallel.world_size,
        parameters=costs.parameters,
        embedding_parameters=costs.embedding_parameters,
        head_parameters=costs.head_parameters,
        parameters_by_kind=_by_kind(costs),
        layers=tuple(_layers(config, costs, sent, sequences)),
        shards=shard_plans,
        imbalance=shards.imbalance,
        memory=max((shard.memory for shard in shard_plans), key=lambda memory: memory.total),
        train_flops_per_token=flops,
        decode_flops_per_token=costs.last_token_flops,
        tokens_per_step=tokens_per_step,
        steps=config.train.steps,
        tokens=tokens,
        train_flops=flops * tokens,
        sequences_per_micro_batch=sequences,
        tokens_per_rank=sequences * max(shards.rank_tokens),
        padded_tokens=shards.padded_tokens - shards.tokens,
        checkpoint_bytes=checkpoint,
        checkpoints_kept_bytes=checkpoint * min(config.checkpoint.keep, _saves(config)),
        eta_seconds=tokens / tokens_per_second if tokens_per_second else None,
    )


def _shard_plans(
    config: RunConfig, costs: ModelCosts, shards: SequenceShards, sent: Traffic, sequences: int
) -> Iterator[ShardPlan]:
    for rank, (tokens, flops) in enumerate(zip(shards.rank_tokens, shards.flops, strict=True)):
        memory = rank_memory(config, costs, shards, sent, sequences, rank)
        yield ShardPlan(tokens, flops / sum(shards.flops), memory)


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


def _layers(config: RunConfig, costs: ModelCosts, sent: Traffic, sequences: int) -> Iterator[LayerPlan]:
    factor, ranks = _train_factor(config.model), config.parallel.sequence

    def over_edges(layer: int, phase: Phase) -> tuple[int, ...]:
        return tuple(sequences * sent.over_edges[layer, phase, edge] for edge in range(ranks - 1))

    for layer in costs.layers:
        swapped = tuple(sequences * sent.swapped[layer.index, rank] for rank in range(ranks))
        yield LayerPlan(
            layer.index,
            layer.kind,
            layer.parameters,
            factor * layer.mean_token_flops,
            layer.decode_state_bytes,
            boundary_bytes=over_edges(layer.index, "forward"),
            returned_bytes=over_edges(layer.index, "backward"),
            swapped_bytes=swapped if ranks > 1 else (),
        )
