"""The parallel pass: every block reads its window and the state, whose folds are replayed from the routes.

Key ranges depend on the block's place in the whole sequence only, so results do not depend on how it is cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.kvm.advance import CallTokens, route_of
from models.kvm.layout import Block, Fold, Plan
from models.kvm.memory import KeyMemory, ValueMemory
from models.kvm.softmax_part import join_parts, softmax_part


@dataclass(frozen=True)
class Queries:
    """Queries [B, T, H, D] of the call from position `start` on, and the inverse temperatures [H] or None."""

    tensor: Tensor
    start: int
    dtype: torch.dtype
    state_temperature: Tensor | None
    window_temperature: Tensor | None

    def block(self, block: Block) -> Tensor:
        """[B, H, c, D]."""
        return heads_first(self.tensor[:, block.start - self.start : block.stop - self.start]).to(self.dtype)


def attend(
    queries: Queries, tokens: CallTokens, routes: Tensor, plan: Plan, keys: KeyMemory, values: ValueMemory
) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, D] and log-sum-exp [B, H, T]; brings both memories to the end of the call."""
    batch, length, heads, _ = queries.tensor.shape
    output = torch.empty_like(queries.tensor, memory_format=torch.contiguous_format)
    log_sum = torch.empty(batch, heads, length, dtype=queries.dtype, device=output.device)
    for block in plan.blocks:
        replay(tokens, routes, plan, block.folds, keys, values)
        q = queries.block(block)
        parts = [
            softmax_part(tempered(q, queries.window_temperature), k, v, causal)
            for _, k, v, causal in window_parts(block, tokens)
        ]
        if block.slots:
            read = slots_view(keys.normed[: block.slots]), slots_view(values.read[: block.slots])
            parts.append(softmax_part(tempered(q, queries.state_temperature), *read, causal=False))
        block_output, block_log_sum = join_parts(parts)
        local = slice(block.start - queries.start, block.stop - queries.start)
        output[:, local] = block_output.transpose(1, 2)
        log_sum[:, :, local] = block_log_sum
    replay(tokens, routes, plan, plan.closing, keys, values)
    return output, log_sum


def replay(
    tokens: CallTokens,
    routes: Tensor,
    plan: Plan,
    folds: tuple[Fold, ...],
    keys: KeyMemory | None,
    values: ValueMemory | None,
) -> None:
    """Bring memories forward over folds whose routes are known."""
    for fold in folds:
        kbar = tokens.norm(tokens.masked_keys(fold))
        routed = tokens.routed(fold, route_of(routes, fold, plan), kbar, with_values=values is not None)
        if keys is not None:
            keys.fold(routed)
        if values is not None:
            values.fold(routed)


def window_parts(block: Block, tokens: CallTokens) -> list[tuple[int, Tensor, Tensor, bool]]:
    """(first position, keys, values [B, H, t, D], causal) of what the block reads from the window."""
    spans = [(block.start, block.stop, True)]
    if block.window_start < block.start:
        spans.append((block.window_start, block.start, False))
    dtype = tokens.norm.weight.dtype
    return [
        (
            start,
            heads_first(tokens.keys.span(start, stop)).to(dtype),
            heads_first(tokens.values.span(start, stop)).to(dtype),
            causal,
        )
        for start, stop, causal in spans
    ]


def heads_first(tensor: Tensor) -> Tensor:
    """[B, t, H, D] as [B, H, t, D]."""
    return tensor.transpose(1, 2)


def slots_view(tensor: Tensor) -> Tensor:
    """Slots first [m, B, H, D] as [B, H, m, D]."""
    return tensor.permute(1, 2, 0, 3)


def tempered(q: Tensor, temperature: Tensor | None) -> Tensor:
    """Inverse temperatures multiply the queries of a part: the scores are those of tempered keys."""
    return q if temperature is None else q * temperature[:, None, None]
