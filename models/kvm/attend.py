"""The parallel pass: every block reads its window and the state, whose folds enter as the blocks pass.

Key ranges depend on the block's place in the whole sequence only, so results do not depend on how it is cut.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from models.kvm.advance import CallTokens, route_of
from models.kvm.layout import Block, Fold, Plan
from models.kvm.memory import KeyMemory, ValueMemory
from models.kvm.softmax_part import join_parts, softmax_part
from models.kvm.workspace import HeadsFirst, WindowReads


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
        self._scaled = HeadsFirst(dtype)

    def local(self, block: Block) -> slice:
        return slice(block.start - self.start, block.stop - self.start)

    def block(self, block: Block) -> Tensor:
        """[B, c, H, D]."""
        return self.tensor[:, self.local(block)]

    def scaled(self, block: Block, scale: Tensor | None) -> Tensor:
        """[B, H, c, D] times a scale [H, D]; valid until the next call."""
        return self._scaled.fill(self.block(block), scale)


def attend(
    queries: Queries,
    tokens: CallTokens,
    plan: Plan,
    keys: KeyMemory,
    values: ValueMemory,
    fold_in: Callable[[tuple[Fold, ...]], None],
) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, D] and log-sum-exp [B, H, T]; `fold_in` brings both memories forward over folds."""
    batch, length, heads, _ = queries.tensor.shape
    output = torch.empty_like(queries.tensor, memory_format=torch.contiguous_format)
    log_sum = torch.empty(batch, heads, length, dtype=queries.dtype, device=output.device)
    windows = WindowReads(tokens.keys, tokens.values, queries.dtype)
    for block in plan.blocks:
        fold_in(block.folds)
        q = queries.scaled(block, queries.window_scale)
        parts = [softmax_part(q, k, v, causal) for _, k, v, causal in windows.parts(block)]
        if block.slots:
            if queries.state_scale is not queries.window_scale:
                q = queries.scaled(block, queries.state_scale)
            read = keys.normed.first(block.slots), values.read.first(block.slots)
            parts.append(softmax_part(q, *read, causal=False))
        block_output, block_log_sum = join_parts(parts)
        local = queries.local(block)
        output[:, local] = block_output.transpose(1, 2)
        log_sum[:, :, local] = block_log_sum
    fold_in(plan.closing)
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


def _spread(temperature: Tensor | None, width: int) -> Tensor | None:
    return None if temperature is None else temperature[:, None].expand(-1, width).contiguous()
