"""Ways to run a linear recurrence from a state, with all their gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from models.layers.chunk_recurrence import ChunkMaps, carry, read

Result = tuple[Tensor, Tensor]  # what is read [B, T, H, V], the state after all [B, H, K, V]
Recurrence = Callable[[list[Tensor], Tensor], Result]


def chunked(chunk_maps: Callable[..., ChunkMaps]) -> Recurrence:
    def run(inputs: list[Tensor], state: Tensor) -> Result:
        maps = chunk_maps(*inputs)
        states, last = carry(maps, state)
        return read(maps, states, inputs[0].shape[1]), last

    return run


def with_gradients(function: Recurrence, inputs: list[Tensor], state: Tensor) -> list[Tensor]:
    """Output, final state and the gradients of all inputs and the initial state, through both."""
    out, last = function(inputs, state)
    weights = [torch.linspace(-1, 1, z.numel(), dtype=z.dtype).sin().view_as(z) for z in (out, last)]
    gradients = torch.autograd.grad((out, last), [*inputs, state], weights)
    return [out.detach(), last.detach(), *gradients]


def doubles(inputs: list[Tensor], state: Tensor) -> tuple[list[Tensor], Tensor]:
    exact = [z.detach().double().requires_grad_() for z in (*inputs, state)]
    return exact[:-1], exact[-1]
