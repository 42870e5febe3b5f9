"""What a call does to the memory and reads of it, as numbers: beside the operator, for people to look at.

Routes come from the operator's own router. Reads are computed by definition, from the weights of one softmax,
and compared with the operator's output. Sequences are looked at one at a time, so there is no batch. With
fewer key-value heads (J) than query heads (H), query head h reads the memory of head h // (H / J).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from models.kvm.advance import CallTokens, Router, route_of
from models.kvm.chunked import Arguments
from models.kvm.layout import Block, Fold
from models.kvm.memory import KeyNorm, RoutedTokens, ValueMemory, as_rows
from models.kvm.torch_passes import TorchPasses


@dataclass(frozen=True)
class Folded:
    """Tokens that entered the state, and how."""

    fold: Fold
    route: Tensor  # [c, J] int32: the slot that a token merged into, or `~slot` of the slot that it opened
    similarity: Tensor  # [c, J] cosine of a merged token's key and its slot's as it was chosen; else NaN
    gate: Tensor | None  # [c, J]
    lengths: Tensor  # [c, J] of the values

    @property
    def slot(self) -> Tensor:
        """[c, J] int64, where each token went."""
        return torch.where(self.route < 0, ~self.route, self.route).long()

    @property
    def opened(self) -> Tensor:
        """[c, J]."""
        return self.route < 0


@dataclass(frozen=True)
class BlockRead:
    """What the queries of one block read: shares of their attention, means over the queries."""

    block: Block
    by_slot: Tensor  # [H, m], m = block.slots, sinks first
    window: Tensor  # [H]
    output_difference: float  # largest, between the output recomputed here and the operator's

    @property
    def state(self) -> Tensor:
        """[H] of all slots together, sinks included."""
        return self.by_slot.sum(dim=-1)


@torch.no_grad()
def inspect_call(given: Arguments, output: Tensor) -> Iterator[Folded | BlockRead]:
    """The folds and reads of a call with one sequence, in order; `output` [1, T, H, D] is what it returned.

    Works a block at a time: nothing of the size tokens x slots is ever held. Raises ValueError for a batch of
    several sequences, or a shard of one.
    """
    if given.q.shape[0] != 1:
        raise ValueError(f"q has {given.q.shape[0]} sequences: a memory is looked at one sequence at a time")
    if not given.alone:
        raise ValueError("exchange: a memory is looked at on one rank; give the whole sequence to it")
    walk = _Walk(given, output)
    for block in walk.plan.blocks:
        for fold in block.folds:
            yield walk.fold(fold)
        yield walk.read(block)
    for fold in walk.plan.closing:
        yield walk.fold(fold)


class _Walk:
    """The slots of a call, folded and read a block at a time."""

    def __init__(self, given: Arguments, output: Tensor) -> None:
        call, tensors = given.call(TorchPasses), given.tensors()
        self.plan, self.settings, self.output = call.plan, call.settings, output
        self.queries, self.dtype = tensors.q, tensors.accumulation_dtype
        self.state_temperature = tensors.state_temperature
        self.window_temperature = tensors.window_temperature
        keys, values, *gate = tensors.tokens(self.plan.start)
        norm = KeyNorm(tensors.norm_weight, tensors.norm_bias)
        self.tokens = CallTokens(keys, values, gate[0] if gate else None, norm, self.settings)
        sums, value_sums, magnitudes = (slots.contiguous() for slots in tensors.boundary())
        self.router = Router(self.tokens, sums, self.plan)
        self.values = ValueMemory(value_sums, magnitudes, self.plan.slots_stop, self.settings)

    def fold(self, fold: Fold) -> Folded:
        before = self.router.memory.sums[: fold.slots_after].clone()
        routed = self.router.fold(fold, with_values=True)
        self.values.fold(routed)
        gate, span = self.tokens.gate, (fold.start, fold.stop)
        return Folded(
            fold,
            route_of(self.router.routes, fold, self.plan)[0],
            _similarity(before, routed, self.tokens.norm),
            None if gate is None else gate.span(*span)[0].to(self.dtype),
            torch.linalg.vector_norm(self.tokens.values_of(fold)[0], dim=-1),
        )

    def read(self, block: Block) -> BlockRead:
        local = slice(block.start - self.plan.start, block.stop - self.plan.start)
        queries = self.queries[0, local].transpose(0, 1).to(self.dtype)  # [H, c, D]
        keys, values = self._window(block)
        scores = _scores(queries, keys, self.window_temperature)
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
        scores.masked_fill_(later.triu_(keys.shape[1] - queries.shape[1] + 1), -torch.inf)
        if block.slots:
            slot_keys = self.router.memory.normed.first(block.slots)[0]
            slot_scores = _scores(queries, slot_keys, self.state_temperature)
            scores = torch.cat([slot_scores, scores], dim=-1)
            values = torch.cat([self.values.read.first(block.slots)[0], values], dim=1)
        weights = scores.softmax(dim=-1)  # [H, c, m + w]
        output = weights @ _of_queries(values, len(weights))
        difference = output.transpose(0, 1) - self.output[0, local].to(self.dtype)
        mass = weights.mean(dim=1)
        return BlockRead(
            block, mass[:, : block.slots], mass[:, block.slots :].sum(dim=-1), difference.abs().max().item()
        )

    def _window(self, block: Block) -> tuple[Tensor, Tensor]:
        """Keys and values [J, w, D] that the block reads beside the state."""
        pieces = (self.tokens.keys, self.tokens.values)
        keys, values = (
            one.span(block.window_start, block.stop)[0].transpose(0, 1).to(self.dtype) for one in pieces
        )
        return keys, values


def _similarity(before: Tensor, routed: RoutedTokens, norm: KeyNorm) -> Tensor:
    """[c, J] of tokens and the slots they merged into, which are summed in `before` [m, 1, J, D] up to the
    fold; slots that the fold opened hold the token that opened them."""
    sums, keys, shape = as_rows(before), as_rows(routed.keys), routed.keys.shape[1:3]
    if routed.opens is not None:
        opens = routed.opens.reshape(-1)
        sums[routed.rows[opens]] = as_rows(routed.weighted(routed.keys))[opens]
    similarity = F.cosine_similarity(keys, norm(sums[routed.rows]), dim=-1)
    if routed.opens is not None:
        similarity.masked_fill_(opens, torch.nan)
    return similarity.view(shape)


def _scores(queries: Tensor, keys: Tensor, temperature: Tensor | None) -> Tensor:
    """[H, c, t] of queries [H, c, D] and keys [J, t, D], inverse temperatures [J]."""
    if temperature is not None:
        keys = keys * temperature.view(len(keys), 1, 1)
    return queries @ _of_queries(keys, len(queries)).transpose(1, 2) * queries.shape[-1] ** -0.5


def _of_queries(rows: Tensor, heads: int) -> Tensor:
    """[H, t, D]: what each query head sees of the rows [J, t, D] of key-value heads."""
    return rows if len(rows) == heads else rows.repeat_interleave(heads // len(rows), dim=0)
