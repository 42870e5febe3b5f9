"""Buffers that a call fills again for every block: fresh memory would cost more than the copy."""

import torch
from torch import Tensor

from models.kvm.layout import Block
from models.kvm.tokens import Tokens


class HeadsFirst:
    """Holds one block's rows heads first and contiguous, which attention kernels like best."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._buffer = torch.empty(0, dtype=dtype)

    def fill(self, rows: Tensor, scale: Tensor | None = None) -> Tensor:
        """Rows [B, c, H, D], times a scale [H, D], as [B, H, c, D]; valid until the next fill."""
        rows = rows.transpose(1, 2)
        if self._buffer.numel() < rows.numel():
            self._buffer = torch.empty(rows.numel(), dtype=self.dtype, device=rows.device)
        held = self._buffer[: rows.numel()].view(rows.shape)
        return held.copy_(rows) if scale is None else torch.mul(rows, scale[:, None], out=held)


class WindowReads:
    """Keys and values of windows; a chunk that the next block reads too is copied once."""

    def __init__(self, keys: Tokens, values: Tokens, dtype: torch.dtype) -> None:
        self.keys = keys
        self.values = values
        self._spare = [(HeadsFirst(dtype), HeadsFirst(dtype)) for _ in range(2)]
        self._held: dict[tuple[int, int], tuple[tuple[HeadsFirst, HeadsFirst], Tensor, Tensor]] = {}

    def parts(self, block: Block) -> list[tuple[int, Tensor, Tensor, bool]]:
        """(first position, keys, values [B, H, t, D], causal) of what the block reads from the window."""
        spans = [(block.start, block.stop)]
        if block.window_start < block.start:
            spans.append((block.window_start, block.start))
        for span in [span for span in self._held if span not in spans]:
            self._spare.append(self._held.pop(span)[0])
        for span in spans:
            if span not in self._held:
                buffers = self._spare.pop()
                k, v = buffers[0].fill(self.keys.span(*span)), buffers[1].fill(self.values.span(*span))
                self._held[span] = buffers, k, v
        return [(span[0], *self._held[span][1:], span[1] == block.stop) for span in spans]
