"""Token shift: a learned blend of every token with the one before."""

import torch
from torch import Tensor, nn

from models.initialise import channel_fraction


class TokenShift(nn.Module):
    """`z + amount * (previous - z)` per channel, amount = 1 - (channel / width)^exponent at first."""

    def __init__(self, width: int, exponent: float) -> None:
        super().__init__()
        self.amount = nn.Parameter(torch.empty(width))
        self.exponent = exponent

    def forward(self, z: Tensor, difference: Tensor) -> Tensor:
        """z and `difference_to_previous` of it [B, T, width] -> [B, T, width]. Separate operations round
        alike at any length, a fused one need not."""
        return z + self.amount * difference

    def initialise(self, generator: torch.Generator) -> None:
        with torch.no_grad():
            self.amount.copy_(1 - channel_fraction(self.amount.numel()) ** self.exponent)


def difference_to_previous(z: Tensor, halo: Tensor, first: Tensor) -> Tensor:
    """z [B, T, d] -> previous - z [B, T, d], one for all shifts of z.

    halo [B, n, d]: the token before the local ones, n = 0 at the start of the sequence, where `first`
    [B, 1, d] takes its place. An empty halo is concatenated too: that keeps the hand-over in the graph.
    """
    edge = [halo, first] if halo.shape[1] == 0 else [halo]
    return torch.cat([*edge, z[:, :-1]], dim=1) - z
