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
    def zeros_like(cls, tokens: "Tokens", dtype: torch.dtype) -> "Tokens":
        def zeros(like: Tensor) -> Tensor:
            return torch.zeros(like.shape, dtype=dtype, device=like.device)

        return cls(None if tokens.before is None else zeros(tokens.before), zeros(tokens.local), tokens.start)

    def span(self, start: int, stop: int) -> Tensor:
        """Tokens [start, stop) by position: a view, or a copy where the two pieces meet."""
        pieces = self._views(start, stop)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def add(self, start: int, rows: Tensor, first_dim: int = 0) -> None:
        """Add rows [B, t, H, D] to the tokens from position `start` on, the first dims left out."""
        for view in self._views(start, start + rows.shape[1]):
            view[..., first_dim:] += rows[:, : view.shape[1], ..., first_dim:]
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
