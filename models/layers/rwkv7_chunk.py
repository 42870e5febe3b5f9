"""The RWKV-7 recurrence in matmuls over chunks, for devices without Triton.

Per head, with state S [K, V]: `S_t = diag(w_t) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T`, read
`o_t = r_t^T S_t`. With G the running sum of log w inside a chunk and S the state before it, every token's
`u_t = a_t^T S_{t-1}` solves a triangular system; the state after the chunk and the reads are affine in S:

    (I - A_ab) u = a~ S + A_ak v,     a~_t = a_t exp(G_{t-1}), b~_t = b_t exp(-G_t), k~_t = k_t exp(-G_t)
    S' = exp(G_C) (S + b~^T u + k~^T v)  = transition S + inflow
    o  = r~ S + A_rb u + A_rk v          = readout S + local,     r~_t = r_t exp(G_t)

A_xy holds the causal products x~_i . y~_j (j < i for a, j <= i for r). Only `carry`, one small matmul a
chunk, is serial. log w > -0.607 keeps the exponents below 20 over a chunk of 32: float32 holds the factors.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.kinds.rwkv7 import CHUNK


class ChunkMaps(NamedTuple):
    """What each of N chunks does to the state before it, and how it reads it."""

    transition: Tensor  # [N, B, H, K, K]
    inflow: Tensor  # [N, B, H, K, V]
    readout: Tensor  # [N, B, H, C, K]
    local: Tensor  # [N, B, H, C, V]


def chunk_maps(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> ChunkMaps:
    """r, log_w, k, a, b [B, T, H, K], v [B, T, H, V], float32 or float64.

    A short last chunk is filled up with tokens that leave the state as it is.
    """
    r, log_w, k, v, a, b = (_in_chunks(z) for z in (r, log_w, k, v, a, b))
    total = log_w.cumsum(-2)
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


def carry(maps: ChunkMaps, state: Tensor) -> tuple[Tensor, Tensor]:
    """state [B, H, K, V] before the first chunk -> states before each [N, B, H, K, V], state after all."""
    states, last = _Carry.apply(maps.transition, maps.inflow, state)
    return states, last


def read(maps: ChunkMaps, states: Tensor, tokens: int) -> Tensor:
    """What the first `tokens` tokens read -> [B, T, H, V]."""
    out = maps.local + maps.readout @ states  # [N, B, H, C, V]
    return out.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :tokens]


class _Carry(torch.autograd.Function):
    """S <- transition S + inflow, chunk by chunk; the gradient of the state runs back the same way."""

    @staticmethod
    def forward(ctx: Any, transition: Tensor, inflow: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        chunks, shape = len(transition), state.shape
        maps, added = transition.flatten(1, 2), inflow.flatten(1, 2)
        states = state.new_empty(chunks + 1, *maps.shape[1:-1], shape[-1])
        states[0] = state.flatten(0, 1)
        for i in range(chunks):
            torch.baddbmm(added[i], maps[i], states[i], out=states[i + 1])
        ctx.save_for_backward(transition, states)
        return states[:-1].unflatten(1, shape[:2]), states[-1].clone().view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        transition, states = ctx.saved_tensors
        grad_states, grad_last = grads
        maps, shape = transition.flatten(1, 2).transpose(-1, -2), grad_last.shape
        grad_states = grad_states.flatten(1, 2)
        after = torch.empty_like(states)  # gradient of every state, from all that comes later
        after[-1] = grad_last.flatten(0, 1)
        for i in range(len(maps) - 1, -1, -1):
            torch.baddbmm(grad_states[i], maps[i], after[i + 1], out=after[i])
        grad_transition = after[1:] @ states[:-1].transpose(-1, -2)
        unflatten = (1, shape[:2])
        return grad_transition.unflatten(*unflatten), after[1:].unflatten(*unflatten), after[0].view(shape)


def _in_chunks(z: Tensor) -> Tensor:
    """[B, T, H, D] -> [N, B, H, C, D], zeros behind the last token."""
    z = F.pad(z, (0, 0, 0, 0, 0, -z.shape[1] % CHUNK))
    return z.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4).contiguous()


def _causal_mask(like: Tensor) -> Tensor:
    """1 where a row may see a column: rows a then r, columns b then k -> [2C, 2C]."""
    ones = like.new_ones(CHUNK, CHUNK)
    return torch.cat([ones.tril(-1).repeat(1, 2), ones.tril().repeat(1, 2)])
