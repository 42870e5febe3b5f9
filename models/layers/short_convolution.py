"""A causal convolution over a few tokens, each channel by itself."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.initialise import uniform_
from models.kinds.recurrence import TAPS


class ShortConvolution(nn.Module):
    """`silu(bias + sum_i weight[:, i] z_{t-3+i})`; tokens before the first one are 0."""

    def __init__(self, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, TAPS))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, z: Tensor, halo: Tensor) -> Tensor:
        """z [B, T, width], halo [B, n, width] the last n <= 3 tokens before -> [B, T, width].

        Products and sums of whole tensors round alike wherever a sequence is cut.
        """
        tokens, taps = z.shape[1], self.weight.unbind(1)
        padded = F.pad(torch.cat([halo, z], dim=1), (0, 0, TAPS - 1 - halo.shape[1], 0))
        first, second, third, last = (w * padded[:, i : i + tokens] for i, w in enumerate(taps))
        out = (first + second) + (third + last)
        return F.silu(out if self.bias is None else out + self.bias)

    def initialise(self, generator: torch.Generator) -> None:
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                uniform_(parameter, TAPS**-0.5, generator)  # PyTorch's default for a convolution
