"""A low-rank linear map, and the value residual that is gated by one."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.initialise import orthogonal_, ramp


class LowRank(nn.Module):
    """`up(activation(down(x))) + bias`.

    base_rank: the rank of the same map at the width that muP scales from. initial_bias [outputs]: None for a
    map without bias.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        rank: int,
        base_rank: int,
        activation: Callable[[Tensor], Tensor] | None = None,
        initial_bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)
        self.bias = None if initial_bias is None else nn.Parameter(torch.empty(outputs))
        self.initial_bias = initial_bias
        self.base_rank = base_rank
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(x)
        out = self.up(hidden if self.activation is None else self.activation(hidden))
        return out if self.bias is None else self.bias + out

    def initialise(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.down.weight)
        outputs, rank = self.up.weight.shape
        orthogonal_(self.up.weight, 0.1 * max(1.0, rank / outputs) ** 0.5, generator)
        if self.bias is not None and self.initial_bias is not None:
            with torch.no_grad():
                self.bias.copy_(self.initial_bias)


class ValueResidual(nn.Module):
    """`v + (v_first - v) * sigmoid(low_rank(x))`: values of the first layer of a kind, gated per channel."""

    def __init__(self, inputs: int, outputs: int, rank: int, base_rank: int) -> None:
        super().__init__()
        self.gate = LowRank(inputs, outputs, rank, base_rank, initial_bias=0.73 - 0.4 * ramp(outputs))

    def forward(self, x: Tensor, value: Tensor, first_value: Tensor) -> Tensor:
        return value + (first_value - value) * torch.sigmoid(self.gate(x))
