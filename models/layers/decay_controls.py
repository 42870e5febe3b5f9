"""What the recurrences that follow Mamba-2 share: step sizes, decay rates, unit keys, gated norms."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.initialise import linear_default_
from models.layers.low_rank import LowRank

SHORTEST_STEP, LONGEST_STEP = 1e-3, 0.1
NORM_EPS = 1e-5


class DecayRates(nn.Module):
    """log w = -exp(log_rate) softplus(z + step_bias), one rate a head, one bias a step.

    Rates start uniform in `rates`, steps log-uniform in [0.001, 0.1] (arXiv 2405.21060).
    """

    def __init__(self, heads: int, steps: int, rates: tuple[float, float]) -> None:
        super().__init__()
        self.rates = rates
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.step_bias = nn.Parameter(torch.empty(steps))

    def step(self, z: Tensor) -> Tensor:
        """z [B, T, steps] -> step sizes [B, T, steps], float32 at least."""
        z = wide(z) + wide(self.step_bias)
        return softplus(z)

    def log_decay(self, step: Tensor) -> Tensor:
        """Step sizes [B, T, H, K or 1] -> [B, T, H, K or 1]."""
        return -wide(self.log_rate).exp().unsqueeze(-1) * step

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        low, high = self.rates
        rate = low + (high - low) * torch.rand(self.log_rate.shape, generator=generator)
        self.log_rate.copy_(rate.clamp(min=1e-4).log())
        spread = math.log(LONGEST_STEP / SHORTEST_STEP)
        step = SHORTEST_STEP * (spread * torch.rand(self.step_bias.shape, generator=generator)).exp()
        self.step_bias.copy_(step + (-torch.expm1(-step)).log())  # softplus turns it back into the step


class ControlMap(LowRank):
    """A low-rank map whose rank does not follow the width."""

    def __init__(self, inputs: int, outputs: int, rank: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, rank, rank, initial_bias=torch.zeros(outputs) if bias else None)

    def initialise(self, generator: torch.Generator) -> None:
        super().initialise(generator)
        linear_default_(self.down.weight, generator)
        linear_default_(self.up.weight, generator)


class RMSNorm(nn.Module):
    """Over equal groups of the last dim, in float32 at least; comes back in the dtype of its weight."""

    def __init__(self, width: int, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        x = wide(x).unflatten(-1, (self.groups, -1))
        normed = F.rms_norm(x, x.shape[-1:], eps=NORM_EPS).flatten(-2)
        return normed.to(self.weight.dtype) * self.weight

    def initialise(self, generator: torch.Generator) -> None:
        nn.init.ones_(self.weight)


def unit(z: Tensor) -> Tensor:
    """`z / sqrt(|z|^2 + 1e-6)` over the last dim, float32 at least."""
    z = wide(z)
    return z * (z.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def softplus(z: Tensor) -> Tensor:
    """log(1 + exp(z)) of operations that round alike at the end of a tensor and within it."""
    return z.relu() + (-z.abs()).exp().log1p()


def wide(z: Tensor) -> Tensor:
    """In float32 at least."""
    return z.to(torch.promote_types(z.dtype, torch.float32))
