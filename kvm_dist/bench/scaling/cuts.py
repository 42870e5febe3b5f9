"""Where a modelled sequence is cut into shards. Imports no torch."""

from collections.abc import Callable, Sequence
from functools import lru_cache

from kvm_dist.bench.scaling.cluster import Cluster
from kvm_dist.bench.scaling.work import block_seconds
from models.config import ModelConfig
from models.sequence_shards import sequence_shards
from parallel.sequence.shard import balanced_shards, equal_shards

Spans = Sequence[tuple[int, int]]
Cut = Callable[[Cluster, ModelConfig, int, int], Spans]  # of a model's tokens over ranks
GROWTH_COST = 3.5  # for pairs, over lengths, ranks and devices the best of 3 to 5 by halves


@lru_cache(maxsize=64)
def _block_costs(cluster: Cluster, model_json: str, tokens: int) -> list[int]:
    return block_seconds(cluster, ModelConfig.model_validate_json(model_json), tokens)


def by_seconds(cluster: Cluster, model: ModelConfig, tokens: int, ranks: int) -> Spans:
    """Shards of equal modelled time, each operation at its own rate: nearly as by growth_cost=3 to 3.5."""
    costs = _block_costs(cluster, model.model_dump_json(), tokens)
    return balanced_shards(costs, ranks, model.kvm.chunk)


def nodes_by_seconds(cluster: Cluster, model: ModelConfig, tokens: int, ranks: int) -> Spans:
    """Of every node, not rank."""
    return by_seconds(cluster, model, tokens, ranks // cluster.node_ranks)


def by_growth(cluster: Cluster, model: ModelConfig, tokens: int, ranks: int) -> Spans:
    """Shards as parallel.growth_cost cuts them, on every device the same."""
    return sequence_shards(model, tokens, ranks, growth_cost=GROWTH_COST).spans


def nodes_by_growth(cluster: Cluster, model: ModelConfig, tokens: int, ranks: int) -> Spans:
    """Of every node, not rank."""
    return by_growth(cluster, model, tokens, ranks // cluster.node_ranks)


def by_flops(cluster: Cluster, model: ModelConfig, tokens: int, ranks: int) -> Spans:
    return sequence_shards(model, tokens, ranks).spans


def by_length(cluster: Cluster, model: ModelConfig, tokens: int, ranks: int) -> Spans:
    return equal_shards(tokens, ranks, model.position_multiple)
