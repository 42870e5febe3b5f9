"""What one rank holds at its fullest, from the configuration alone. No torch.

With P parameters, N ranks, t tokens of a micro-batch's shards on the rank, a micro-batches of a step, b bytes
of a number of the model's dtype (2 or 4) and the ZeRO stage z:

    weights             b P, shared by N if z = 3
    masters and moments (4 P if z > 0) + 8 P, shared by N if z >= 1
    gradients           4 P, shared by N if z >= 2
    activations         t (4 V + what the layers keep of a token for the backward), V the vocabulary; without
                        4 V where the loss is taken in chunks
    working             the larger of: t times gradients of the logits, or the logits of a chunk with theirs;
                        t times what one layer computes again
    states              received from the rank or node before, copies of what two micro-batches send, and of
                        one layer at work the state and its gradient

Where micro-batches go two ways, activations and states are those of a pair.
What layers keep of a token is stated by their kinds and was measured; fused kernels keep less.
"""

from dataclasses import dataclass, replace

from kvm_dist.config import RunConfig
from kvm_dist.plan_messages import Traffic, element_bytes
from models.config import KVMConfig
from models.costs import ModelCosts
from models.kinds.attention import window_elements
from models.messages import swaps_heads
from models.node_messages import NodeOfRanks
from models.sequence_shards import SequenceShards


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank; buffers of the engine and of the allocator come on top."""

    weights: int
    masters_and_moments: int
    gradients: int
    activations: int
    working: int
    states: int

    @property
    def total(self) -> int:
        model = self.weights + self.masters_and_moments + self.gradients
        return model + self.activations + self.working + self.states


def rank_memory(
    config: RunConfig, costs: ModelCosts, shards: SequenceShards, sent: Traffic, sequences: int, rank: int
) -> MemoryPlan:
    """Of sequence rank `rank`, which holds shards of `sequences` sequences at a time.

    Where micro-batches go two ways, of the rank that has shard `rank` of one and its mirror of the other.
    """
    mirror = len(shards.spans) - 1 - rank
    held = (rank, mirror) if _held_together(config) == 2 else (rank,)
    one_way = [_one_micro_batch(config, costs, shards, sent, sequences, place) for place in held]
    return replace(
        one_way[0],
        activations=sum(one.activations for one in one_way),
        working=max(one.working for one in one_way),
        states=sum(one.states for one in one_way),
    )


def _held_together(config: RunConfig) -> int:
    """Micro-batches between whose forward and backward a rank is at the same time."""
    parallel = config.parallel
    return 2 if parallel.two_way_chain and parallel.sequence > 1 and config.train.accumulation > 1 else 1


def _one_micro_batch(
    config: RunConfig, costs: ModelCosts, shards: SequenceShards, sent: Traffic, sequences: int, rank: int
) -> MemoryPlan:
    parallel, count = config.parallel, costs.parameters
    width, stage, ranks = element_bytes(parallel), parallel.zero_stage, parallel.world_size
    masters = 0 if stage == 0 else 4 * count  # stage 0 updates the float32 weights themselves
    start, stop = shards.spans[rank]
    tokens = sequences * (stop - start)
    chunk, vocabulary = config.train.loss_chunk, config.model.vocab_size
    kept = costs.saved_token_bytes + (4 * vocabulary if chunk is None else 0)
    gradients = 4 if width == 4 else 4 + width
    logits = vocabulary * (tokens * gradients if chunk is None else min(chunk, tokens) * (4 + gradients))
    recomputed = max(layer.recomputed_token_bytes for layer in costs.layers)
    return MemoryPlan(
        weights=width * count // (ranks if stage == 3 else 1),
        masters_and_moments=(masters + 8 * count) // (ranks if stage else 1),
        gradients=4 * count // (ranks if stage >= 2 else 1),
        activations=tokens * kept + sequences * _keys_of_ranks_before(config, shards, rank),
        working=max(logits, tokens * recomputed),
        states=sequences * _states(config, shards, sent, rank),
    )


def _states(config: RunConfig, shards: SequenceShards, sent: Traffic, rank: int) -> int:
    """Of one sequence; what was sent is kept until the next micro-batch, or the next pair, ends."""
    model = config.model
    at_work = 2 * 4 * max(_state_numbers(config, shards, kind, rank) for kind in set(model.layer_kinds))
    rounds = -(-config.train.accumulation // _held_together(config))
    return at_work + sent.received[rank] + min(rounds, 2) * sent.sent[rank]


def _state_numbers(config: RunConfig, shards: SequenceShards, kind: str, rank: int) -> int:
    """Of one layer's state at the end of what the rank computes of it."""
    model, size, stop = config.model, config.parallel.head_parallel, shards.spans[rank][1]
    layer = model.layer_config(kind)
    if size == 1 or config.parallel.node_splits != "operator" or not isinstance(layer, KVMConfig):
        return layer.cost(model, stop).boundary.float32
    stop = shards.spans[rank // size * size + size - 1][1]
    heads = NodeOfRanks(shards.spans, size, rank, layer.key_value_heads(model)).heads(rank)
    return layer.cost(model, stop).boundary.float32 * heads // layer.key_value_heads(model)


def _keys_of_ranks_before(config: RunConfig, shards: SequenceShards, rank: int) -> int:
    """Full attention without a split by heads keeps the keys and values of all tokens before its shard."""
    model = config.model
    if len(shards.spans) == 1 or swaps_heads(model, shards.spans):
        return 0
    layers = sum(model.layer_config(kind).reads_by_heads for kind in model.layer_kinds)
    return layers * window_elements(model, shards.spans[rank][0]) * element_bytes(config.parallel)
