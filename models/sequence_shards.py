"""How one sequence of a model is spread over ranks: chunk-aligned shards of equal cost. Imports no torch."""

from dataclasses import dataclass
from itertools import accumulate
from math import lcm

from models.config import KVMConfig, ModelConfig
from models.costs import block_flops
from parallel.sequence.shard import balanced_shards, equal_shards

NODE_MULTIPLE = 8  # tokens: products of fewer rows round in their own way


@dataclass(frozen=True)
class SequenceShards:
    """tokens: of the sequence. spans: [start, stop) of every rank; the last one ends after the pads.

    flops: modelled, of each rank's part of one forward, each as long as one of a projection.
    """

    tokens: int
    spans: tuple[tuple[int, int], ...]
    flops: tuple[int, ...]

    @property
    def padded_tokens(self) -> int:
        return self.spans[-1][1]

    @property
    def rank_tokens(self) -> tuple[int, ...]:
        """Tokens of every rank, pads left out."""
        return tuple(min(stop, self.tokens) - start for start, stop in self.spans)

    @property
    def longest(self) -> int:
        """Tokens of the longest span, pads included."""
        return max(stop - start for start, stop in self.spans)

    @property
    def imbalance(self) -> float:
        """By how much the dearest rank's cost exceeds the mean: 0.05 is 5 % of waiting for all others."""
        return max(self.flops) * len(self.flops) / sum(self.flops) - 1


def sequence_shards(
    model: ModelConfig,
    tokens: int,
    ranks: int,
    *,
    balanced: bool = True,
    growth_cost: float = 1.0,
    node_ranks: int = 1,
) -> SequenceShards:
    """Shards of `tokens` tokens, padded at the end to whole blocks of the model.

    balanced: of equal modelled cost; else of equal length. Both as nearly as whole blocks allow. growth_cost:
    of a FLOP that a block has more than the first, beside one that all have. node_ranks: neighbours that
    share the cost of all their tokens, which are then of equal length among them. Raises ValueError where
    `shards_problem` finds one.
    """
    if problem := shards_problem(model, tokens, ranks):
        raise ValueError(problem)
    block = model.position_multiple
    counted = block_flops(model, -(-tokens // block), block, ranks)
    costs = [counted[0] + int(growth_cost * (one - counted[0])) for one in counted]
    if not balanced:
        spans = equal_shards(tokens, ranks, block)
    else:
        spans = _even_in_nodes(balanced_shards(costs, ranks, block), node_ranks, _multiple_in_nodes(model))
    before = [0, *accumulate(costs)]
    flops = [_cost_before(before, stop, block) - _cost_before(before, start, block) for start, stop in spans]
    return SequenceShards(tokens, tuple(spans), tuple(_shared_in_nodes(flops, node_ranks)))


def _shared_in_nodes(flops: list[int], node_ranks: int) -> list[int]:
    nodes = [sum(flops[first : first + node_ranks]) for first in range(0, len(flops), node_ranks)]
    return [node // node_ranks for node in nodes for _ in range(node_ranks)]


def _cost_before(before: list[int], position: int, block: int) -> int:
    """before: costs of all blocks before each. A part of a block costs its share."""
    index, rest = divmod(position, block)
    return before[index] + (rest and (before[index + 1] - before[index]) * rest // block)


def _even_in_nodes(spans: list[tuple[int, int]], node_ranks: int, multiple: int) -> list[tuple[int, int]]:
    """The same nodes, each cut anew into equal shards."""
    if node_ranks == 1:
        return spans
    even: list[tuple[int, int]] = []
    for first in range(0, len(spans), node_ranks):
        start, stop = spans[first][0], spans[first + node_ranks - 1][1]
        even += [(start + a, start + b) for a, b in equal_shards(stop - start, node_ranks, multiple)]
    return even


def _multiple_in_nodes(model: ModelConfig) -> int:
    """Where a node's tokens may be cut: KVM sees them as one."""
    others = [one for one in model.used_layer_configs.values() if not isinstance(one, KVMConfig)]
    multiple = lcm(NODE_MULTIPLE, *(one.position_multiple for one in others))
    block = model.position_multiple
    return multiple if block % multiple == 0 else block


def shards_problem(model: ModelConfig, tokens: int, ranks: int) -> str | None:
    """Why a sequence of `tokens` tokens is too short for `ranks` ranks, in the words of the configuration."""
    block = model.position_multiple
    blocks = -(-tokens // block)
    if blocks >= ranks:
        return None
    return (
        f"data.sequence_length={tokens} is too short for parallel.sequence={ranks}: every rank holds at "
        f"least one block of {block} tokens; use parallel.sequence={blocks} or less, or "
        f"data.sequence_length={(ranks - 1) * block + 1} or more"
    )
