"""What the chunk forms of all linear recurrences share: affine maps of a state, carried chunk by chunk.

A recurrence whose step is affine in its state S [K, V] is cut into chunks of C tokens. What a chunk does is

    S' = transition S + inflow,     o = readout S + local

and only the first of them, one small product a chunk, is serial.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.kinds.recurrence import CHUNK


class ChunkMaps(NamedTuple):
    """What each of N chunks does to the state before it, and how it reads it.

    A transition of one column scales the rows of the state, one of a single number the whole of it.
    """

    transition: Tensor  # [N, B, H, K, K], [N, B, H, K, 1] or [N, B, H, 1, 1]
    inflow: Tensor  # [N, B, H, K, V]
    readout: Tensor  # [N, B, H, C, K]
    local: Tensor  # [N, B, H, C, V]


def in_chunks(z: Tensor) -> Tensor:
    """[B, T, H, D] -> [N, B, H, C, D], zeros behind the last token."""
    z = F.pad(z, (0, 0, 0, 0, 0, -z.shape[1] % CHUNK))
    return z.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4).contiguous()


def running_sum(z: Tensor) -> Tensor:
    """Over the tokens of chunks [..., C, D], each its own included.

    On a GPU torch's own refuses to run where the same bits are wanted every time.
    """
    return _sum_by_doubling(z) if z.is_cuda else z.cumsum(-2)


def _sum_by_doubling(z: Tensor) -> Tensor:
    step = 1
    while step < z.shape[-2]:
        z = z + F.pad(z[..., :-step, :], (0, 0, step, 0))
        step *= 2
    return z


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
        states = state.new_empty(chunks + 1, *added.shape[1:])
        states[0] = state.flatten(0, 1)
        for i in range(chunks):
            _apply(maps[i], states[i], added[i], states[i + 1])
        ctx.save_for_backward(transition, states)
        return states[:-1].unflatten(1, shape[:2]), states[-1].clone().view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        transition, states = ctx.saved_tensors
        grad_states, grad_last = grads
        maps, shape = transition.flatten(1, 2), grad_last.shape
        scales = maps.shape[-1] == 1
        maps = maps if scales else maps.transpose(-1, -2)
        grad_states = grad_states.flatten(1, 2)
        after = torch.empty_like(states)  # gradient of every state, from all that comes later
        after[-1] = grad_last.flatten(0, 1)
        for i in range(len(maps) - 1, -1, -1):
            _apply(maps[i], after[i + 1], grad_states[i], after[i])
        if scales:
            grad_transition = (after[1:] * states[:-1]).sum_to_size(maps.shape)
        else:
            grad_transition = after[1:] @ states[:-1].transpose(-1, -2)
        unflatten = (1, shape[:2])
        return grad_transition.unflatten(*unflatten), after[1:].unflatten(*unflatten), after[0].view(shape)


def _apply(transition: Tensor, state: Tensor, added: Tensor, out: Tensor) -> None:
    if transition.shape[-1] == 1:
        torch.addcmul(added, transition, state, out=out)
    else:
        torch.baddbmm(added, transition, state, out=out)
