"""Rotary position encoding of the first dims of a head, with angles in float64."""

from functools import lru_cache

import torch
from torch import Tensor


def rotate(x: Tensor, start: int, dims: int, base: float) -> Tensor:
    """x [B, T, H, D] with its first `dims` rotated, tokens standing at positions start, start + 1, ...

    Interleaved pairs (x0, x1), (x2, x3), ...; pair p of P turns by t * base^(-p / (P - 1)) at position t.
    Rotates in float32 at least, whatever the dtype of x.
    """
    if dims == 0:
        return x
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = _tables(start, x.shape[1], dims, base, dtype, str(x.device))
    even, odd = x[..., 0:dims:2].to(dtype), x[..., 1:dims:2].to(dtype)
    turned = torch.stack([even * cos + odd * sin, odd * cos - even * sin], dim=-1).flatten(-2).to(x.dtype)
    return turned if dims == x.shape[-1] else torch.cat([turned, x[..., dims:]], dim=-1)


@lru_cache(maxsize=8)
def _tables(
    start: int, tokens: int, dims: int, base: float, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, P]. Float32 angles would be off by 2e-3 at 32K tokens."""
    pairs = dims // 2
    with torch.inference_mode(False), torch.no_grad():  # kept ones may be used for training later
        exponents = torch.arange(pairs, dtype=torch.float64, device=device) / max(pairs - 1, 1)
        positions = torch.arange(start, start + tokens, dtype=torch.float64, device=device)
        angles = torch.outer(positions, base**-exponents).unsqueeze(1)
        return angles.cos().to(dtype), angles.sin().to(dtype)
