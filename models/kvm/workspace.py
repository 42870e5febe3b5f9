"""Rows as attention kernels take them, heads first: of one block, or of neighbouring blocks in one call.

A kernel's results do not depend on how many blocks it is given, so groups may be cut anywhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from models.kvm.layout import Block, Plan
from models.kvm.tokens import Tokens

GROUPED_BLOCKS = 4  # fewer operations; more blocks would leave a core's cache


@dataclass(frozen=True)
class BlockGroup:
    """Blocks that follow each other, of one length, one reach before themselves; all read slots or none."""

    blocks: tuple[Block, ...]

    @property
    def start(self) -> int:
        return self.blocks[0].start

    @property
    def stop(self) -> int:
        return self.blocks[-1].stop

    @property
    def reach(self) -> int:
        """Tokens before each block that it reads from the window."""
        return self.start - self.blocks[0].window_start

    def rows(self, tensor: Tensor) -> Tensor:
        """[B, t, H, ...] of the group's tokens, or of as many, as [b, H, c, ...] with b blocks or B."""
        if len(self.blocks) > 1:
            tensor = tensor.unflatten(1, (len(self.blocks), -1))[0]
        return tensor.transpose(1, 2)

    def tokens(self, rows: Tensor) -> Tensor:
        """[b, H, c, ...] as [B, t, H, ...]."""
        return rows.transpose(1, 2).flatten(0, 1)[None] if len(self.blocks) > 1 else rows.transpose(1, 2)

    def rows_of_sums(self, sums: Tensor) -> Tensor:
        """[B, H, t] as [b, H, c]."""
        if len(self.blocks) > 1:
            return sums[0].unflatten(1, (len(self.blocks), -1)).transpose(0, 1)
        return sums

    def of_block(self, rows: Tensor, place: int) -> Tensor:
        """What a block has in rows [b, ...]."""
        return rows[place : place + 1] if len(self.blocks) > 1 else rows


def block_groups(plan: Plan, batch: int) -> Iterator[BlockGroup]:
    """The blocks of a plan, grouped where one call can read their windows: a kernel has one dimension for
    batch and blocks, and tokens before the call lie in another tensor."""
    group: list[Block] = []
    for block in plan.blocks:
        if group and not (batch == 1 and _continues(group, block, plan)):
            yield BlockGroup(tuple(group))
            group = []
        group.append(block)
    if group:
        yield BlockGroup(tuple(group))


def _continues(group: list[Block], block: Block, plan: Plan) -> bool:
    first, length = group[0], block.stop - block.start
    reach = block.start - block.window_start
    return (
        len(group) < GROUPED_BLOCKS
        and length == first.stop - first.start
        and reach == first.start - first.window_start
        and first.window_start >= plan.start
        and bool(block.slots) == bool(first.slots)
    )


class ScaledRows:
    """A buffer that is filled again for every group: fresh memory would cost more than the product."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._buffer = torch.empty(0, dtype=dtype)

    def fill(self, tokens: Tensor, scale: Tensor) -> Tensor:
        """Tokens [B, t, H, D] times a scale [H, D], in their order; valid until the next call."""
        if self._buffer.numel() < tokens.numel():
            self._buffer = torch.empty(tokens.numel(), dtype=self.dtype, device=tokens.device)
        return torch.mul(tokens, scale, out=self._buffer[: tokens.numel()].view(tokens.shape))


def window_of(tokens: Tokens, group: BlockGroup, dtype: torch.dtype) -> Tensor:
    """[b, H, t, D] what each block reads from the window; windows of a group overlap in memory."""
    span = tokens.span(group.blocks[0].window_start, group.stop).to(dtype)
    if len(group.blocks) == 1:
        return span.transpose(1, 2)
    length = group.blocks[0].stop - group.start
    return span[0].unfold(0, group.reach + length, length).transpose(2, 3)
