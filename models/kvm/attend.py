"""The parallel pass: every block reads its window and the state, whose folds enter as the blocks pass.

Key ranges depend on the block's place in the whole sequence only, so results do not depend on how it is cut.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from models.kvm.advance import CallTokens, route_of
from models.kvm.layout import Fold, Plan
from models.kvm.memory import KeyMemory, ValueMemory
from models.kvm.softmax_part import join_into, softmax_part
from models.kvm.workspace import BlockGroup, ScaledRows, block_groups, window_of


class Queries:
    """Queries of the call from position `start` on, and what multiplies them for each part.

    Inverse temperatures are applied to queries, not to keys: the scores are the same. They are spread to
    [H, D], so that the product runs over contiguous rows; those of a key's head to all queries that read it.
    """

    def __init__(
        self,
        tensor: Tensor,
        start: int,
        dtype: torch.dtype,
        state_temperature: Tensor | None,
        window_temperature: Tensor | None,
    ) -> None:
        """tensor: [B, T, H, D]; temperatures: of the heads of keys, or None for 1."""
        self.tensor = tensor
        self.start = start
        self.dtype = dtype
        self.state_scale = _spread(state_temperature, *tensor.shape[2:])
        self.window_scale = _spread(window_temperature, *tensor.shape[2:])
        self._for_window, self._for_state = ScaledRows(dtype), ScaledRows(dtype)

    def local(self, group: BlockGroup) -> slice:
        return slice(group.start - self.start, group.stop - self.start)

    def of(self, group: BlockGroup) -> Tensor:
        """[B, t, H, D]."""
        return self.tensor[:, self.local(group)]

    def for_window(self, group: BlockGroup) -> Tensor:
        """[b, H, c, D] as the window is asked; valid until the next call."""
        return self._rows(group, self.window_scale, self._for_window)

    def for_state(self, group: BlockGroup) -> Tensor:
        """[b, H, c, D] as the state is asked; valid until the next call."""
        return self._rows(group, self.state_scale, self._for_state)

    def _rows(self, group: BlockGroup, scale: Tensor | None, buffer: ScaledRows) -> Tensor:
        tokens = self.of(group)
        return group.rows(tokens.to(self.dtype) if scale is None else buffer.fill(tokens, scale))


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
    for group in block_groups(plan, batch):
        k, v = (window_of(one, group, queries.dtype) for one in (tokens.keys, tokens.values))
        window = softmax_part(queries.for_window(group), k, v, causal=True)
        q = queries.for_state(group)
        reads = []
        for place, block in enumerate(group.blocks):
            fold_in(block.folds)
            if block.slots:
                slots = keys.normed.first(block.slots), values.read.first(block.slots)
                reads.append(softmax_part(group.of_block(q, place), *slots, causal=False))
        local = queries.local(group)
        out, sums = group.rows(output[:, local]), group.rows_of_sums(log_sum[:, :, local])
        join_into(out, sums, window, _stacked(reads))
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


def _stacked(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
    """One part [b, H, c, ...] of those of b blocks, tokens outermost in memory as kernels leave them."""
    if len(parts) < 2:
        return parts[0] if parts else None
    outputs, log_sums = zip(*parts, strict=True)
    return torch.cat([one.transpose(1, 2) for one in outputs]).transpose(1, 2), torch.cat(log_sums)


def _spread(temperature: Tensor | None, heads: int, width: int) -> Tensor | None:
    if temperature is None:
        return None
    return temperature[:, None, None].expand(-1, heads // len(temperature), width).reshape(heads, width)
