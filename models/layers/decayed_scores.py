"""Causal scores under decay, safe for decays of any strength."""

import torch
from torch import Tensor

SMALLEST_BLOCK = 8  # tokens whose pairs are weighed one by one


def decayed_scores(rows: Tensor, keys: Tensor, total: Tensor) -> Tensor:
    """`sum_d rows[i, d] keys[j, d] exp(total[i, d] - total[j, d])` for j <= i, 0 above.

    rows [..., M, C, K]: M sets of rows over the same keys [..., C, K]. total [..., C, K or 1]: the running
    sum of the log decays, which never rises; float64, so that differences of large sums stay exact.
    Returns [..., M, C, C].

    Only differences that are at most 0 are exponentiated: split into exp(total[i]) exp(-total[j]), the
    factors overflow where a channel forgets within a chunk.
    """
    if total.shape[-1] == 1:
        decay = _decay(total.unsqueeze(-2), total.unsqueeze(-3), rows.dtype).squeeze(-1)
        return (rows @ keys.transpose(-1, -2).unsqueeze(-3)) * decay.unsqueeze(-3)
    if keys.shape[-2] <= SMALLEST_BLOCK:
        return _pair_by_pair(rows, keys, total)
    return _in_halves(rows, keys, total)


def _in_halves(rows: Tensor, keys: Tensor, total: Tensor) -> Tensor:
    """Blocks on the diagonal by the same rule; the block below them in one product, with the sum between the
    halves as the origin of both factors' exponents."""
    half = keys.shape[-2] // 2
    size = (-2, (2, half))
    blocks = rows.unflatten(*size).transpose(-4, -3)  # [..., 2, M, half, K]
    upper, lower = decayed_scores(blocks, keys.unflatten(*size), total.unflatten(*size)).unbind(-4)
    middle = total[..., half - 1 : half, :]
    late = rows[..., half:, :] * (total[..., half:, :] - middle).to(rows.dtype).exp().unsqueeze(-3)
    early = keys[..., :half, :] * (middle - total[..., :half, :]).to(rows.dtype).exp()
    below = late @ early.transpose(-1, -2).unsqueeze(-3)
    above = torch.zeros_like(below)
    return torch.cat([torch.cat([upper, above], dim=-1), torch.cat([below, lower], dim=-1)], dim=-2)


def _pair_by_pair(rows: Tensor, keys: Tensor, total: Tensor) -> Tensor:
    decay = _decay(total.unsqueeze(-2), total.unsqueeze(-3), rows.dtype)  # [..., C, C, K]
    weighed = decay * keys.unsqueeze(-3)
    by_row = rows.movedim(-3, -1)  # [..., C, K, M]
    return (weighed @ by_row).movedim(-1, -3)


def _decay(later: Tensor, earlier: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(later - earlier) where a row may see a column, 0 elsewhere: [..., C, 1, D] and [..., 1, C, D] ->
    [..., C, C, D]."""
    tokens = later.shape[-3]
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=later.device).triu(1).unsqueeze(-1)
    return (later - earlier).masked_fill(hidden, -torch.inf).to(dtype).exp()
