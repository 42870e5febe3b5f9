"""The RWKV-7 recurrence in matmuls over chunks, for devices without Triton.

Per head, with state S [K, V]: `S_t = diag(w_t) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T`, read
`o_t = r_t^T S_t`. With G the running sum of log w inside a chunk and S the state before it, every token's
`u_t = a_t^T S_{t-1}` solves a triangular system; the state after the chunk and the reads are affine in S:

    (I - A_ab) u = a~ S + A_ak v,     a~_t = a_t exp(G_{t-1}), b~_t = b_t exp(-G_t), k~_t = k_t exp(-G_t)
    S' = exp(G_C) (S + b~^T u + k~^T v)  = transition S + inflow
    o  = r~ S + A_rb u + A_rk v          = readout S + local,     r~_t = r_t exp(G_t)

A_xy holds the causal products x~_i . y~_j (j < i for a, j <= i for r). log w > -0.607 keeps the exponents
below 20 over a chunk of 32: float32 holds the factors.
"""

import torch
from torch import Tensor

from models.kinds.recurrence import CHUNK
from models.layers.chunk_recurrence import ChunkMaps, in_chunks, running_sum


def chunk_maps(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> ChunkMaps:
    """r, log_w, k, a, b [B, T, H, K], v [B, T, H, V], float32 or float64.

    A short last chunk is filled up with tokens that leave the state as it is.
    """
    r, log_w, k, v, a, b = (in_chunks(z) for z in (r, log_w, k, v, a, b))
    total = running_sum(log_w)
    shrink = (-total).exp()
    ar = torch.cat([a * (total - log_w).exp(), r * total.exp()], dim=-2)  # [N, B, H, 2C, K]
    bk = torch.cat([b * shrink, k * shrink], dim=-2)
    scores = (ar @ bk.transpose(-1, -2)) * _causal_mask(r)
    (a_b, a_k), (r_b, r_k) = (rows.split(CHUNK, dim=-1) for rows in scores.split(CHUNK, dim=-2))
    (a, r), (b, k) = ar.split(CHUNK, dim=-2), bk.split(CHUNK, dim=-2)
    identity = torch.eye(CHUNK, dtype=r.dtype, device=r.device)
    right = torch.cat([a, a_k @ v], dim=-1)
    u = torch.linalg.solve_triangular(identity - a_b, right, upper=False, unitriangular=True)
    key_width = r.shape[-1]
    to_state, to_reads = b.transpose(-1, -2) @ u, r_b @ u
    decay = total[..., -1, :, None].exp()
    state_identity = torch.eye(key_width, dtype=r.dtype, device=r.device)
    return ChunkMaps(
        transition=decay * (state_identity + to_state[..., :key_width]),
        inflow=decay * (to_state[..., key_width:] + k.transpose(-1, -2) @ v),
        readout=r + to_reads[..., :key_width],
        local=to_reads[..., key_width:] + r_k @ v,
    )


def _causal_mask(like: Tensor) -> Tensor:
    """1 where a row may see a column: rows a then r, columns b then k -> [2C, 2C]."""
    ones = like.new_ones(CHUNK, CHUNK)
    return torch.cat([ones.tril(-1).repeat(1, 2), ones.tril().repeat(1, 2)])
