"""The parallel pass: every block reads its window and the state, whose folds are replayed from the routes.

Key ranges depend on the block's place in the whole sequence only, so results do not depend on how it is cut.
"""

import torch
from torch import Tensor

from models.kvm.advance import CallTokens, route_of
from models.kvm.layout import Block, Fold, Plan
from models.kvm.memory import KeyMemory, ValueMemory
from models.kvm.softmax_part import join_parts, softmax_part


class Queries:
    """Queries of the call from position `start` on, and what multiplies them for each part.

    Inverse temperatures are applied to queries, not to keys: the scores are the same. They are spread to
    [H, D], so that the product runs over contiguous rows.
    """

    def __init__(
        self,
        tensor: Tensor,
        start: int,
        dtype: torch.dtype,
        state_temperature: Tensor | None,
        window_temperature: Tensor | None,
    ) -> None:
        """tensor: [B, T, H, D]; temperatures: [H] or None for 1."""
        self.tensor = tensor
        self.start = start
        self.dtype = dtype
        self.state_scale = _spread(state_temperature, tensor.shape[3])
        self.window_scale = _spread(window_temperature, tensor.shape[3])

    def local(self, block: Block) -> slice:
        return slice(block.start - self.start, block.stop - self.start)

    def block(self, block: Block) -> Tensor:
        """[B, c, H, D]."""
        return self.tensor[:, self.local(block)].to(self.dtype)


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
        window_q = heads_first(scaled(q, queries.window_scale))
        parts = [softmax_part(window_q, k, v, causal) for _, k, v, causal in window_parts(block, tokens)]
        if block.slots:
            read = slots_view(keys.normed[: block.slots]), slots_view(values.read[: block.slots])
            parts.append(softmax_part(heads_first(scaled(q, queries.state_scale)), *read, causal=False))
        block_output, block_log_sum = join_parts(parts)
        local = queries.local(block)
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


def scaled(rows: Tensor, scale: Tensor | None) -> Tensor:
    """Rows [B, c, H, D] times a scale [H, D]."""
    return rows if scale is None else rows * scale


def _spread(temperature: Tensor | None, width: int) -> Tensor | None:
    return None if temperature is None else temperature[:, None].expand(-1, width).contiguous()
