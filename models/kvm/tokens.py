"""Tokens that lie in two pieces: those of this call, and the few before it that its window reads."""

import torch
from torch import Tensor


class Tokens:
    """[B, t, H, ...] for the tokens up to the end of a call, never joined: that would copy the call."""

    def __init__(self, before: Tensor | None, local: Tensor, start: int) -> None:
        """`start` is the position of `local[:, 0]`; `before` [B, w, H, ...] holds the w tokens before it."""
        self.before = before
        self.local = local
        self.start = start

    @classmethod
    def zeros_like(cls, tokens: "Tokens", dtype: torch.dtype, local_from: int = 0) -> "Tokens":
        """Zeros, but for the local tokens before position `local_from`, which are not written yet."""
        before, local = tokens.before, tokens.local
        zeros = None if before is None else torch.zeros(before.shape, dtype=dtype, device=before.device)
        held = torch.empty(local.shape, dtype=dtype, device=local.device)
        held[:, max(local_from - tokens.start, 0) :] = 0
        return cls(zeros, held, tokens.start)

    def span(self, start: int, stop: int) -> Tensor:
        """Tokens [start, stop) by position: a view, or a copy where the two pieces meet."""
        pieces = self._views(start, stop)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def add(self, start: int, rows: Tensor, first_dim: int = 0) -> None:
        """Add rows [B, t, H, D] to the tokens from position `start` on, the first dims left out."""
        for view in self._views(start, start + rows.shape[1]):
            view[..., first_dim:] += rows[:, : view.shape[1], ..., first_dim:]
            rows = rows[:, view.shape[1] :]

    def put(self, start: int, rows: Tensor) -> None:
        """Write rows [B, t, H, ...] over the tokens from position `start` on."""
        for view in self._views(start, start + rows.shape[1]):
            view.copy_(rows[:, : view.shape[1]])
            rows = rows[:, view.shape[1] :]

    def _views(self, start: int, stop: int) -> list[Tensor]:
        views = []
        if start < self.start:
            assert self.before is not None, "a token before the call is read but was not handed over"
            base = self.start - self.before.shape[1]
            views.append(self.before[:, start - base : min(stop, self.start) - base])
        if stop > self.start:
            views.append(self.local[:, max(start - self.start, 0) : stop - self.start])
        return views
