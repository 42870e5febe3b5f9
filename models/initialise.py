"""Initial parameters: one seed, one generator, every parameter filled by the module that holds it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Initialised(Protocol):
    """A module that fills the parameters it holds directly."""

    def initialise(self, generator: torch.Generator) -> None: ...


def initialise(model: nn.Module, seed: int) -> None:
    """Fill all parameters of `model`: a function of the seed and the model's shape, not of the global RNG nor
    of how many threads the CPU has."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, Initialised):
            module.initialise(generator)


@torch.no_grad()
def uniform_(weight: Tensor, bound: float, generator: torch.Generator) -> None:
    weight.copy_((2 * torch.rand(weight.shape, generator=generator) - 1) * bound)


def linear_default_(weight: Tensor, generator: torch.Generator) -> None:
    """PyTorch's default for a Linear: uniform within 1/sqrt(inputs)."""
    uniform_(weight, weight.shape[1] ** -0.5, generator)


@torch.no_grad()
def orthogonal_(weight: Tensor, gain: float, generator: torch.Generator) -> None:
    """Orthogonal in float32 on the CPU, then copied to the weight's dtype and device.

    By one thread: threads that share a factorisation round its last bits as they share it.
    """
    with _one_thread():
        weight.copy_(nn.init.orthogonal_(torch.empty(weight.shape), gain, generator=generator))


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def channel_fraction(width: int) -> Tensor:
    """j / width of every channel j."""
    return torch.arange(width) / width


def ramp(width: int) -> Tensor:
    """From -0.5 at the first channel to 0.5 at the last."""
    return torch.arange(width) / max(width - 1, 1) - 0.5
