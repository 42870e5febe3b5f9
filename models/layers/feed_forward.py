"""The squared-ReLU feed-forward part of a block, with its token shift."""

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.initialise import orthogonal_
from models.layers.segment import segment
from models.layers.token_shift import TokenShift, difference_to_previous
from parallel.sequence.context import SequenceContext


class FeedForward(nn.Module):
    """`contract(relu(expand(shift(x)))^2)`; the token before the first one is 0."""

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__()
        self.name = f"{index}.feed_forward"
        self.recompute = model.activation_checkpointing
        exponent = (1 - index / model.num_layers) ** 4
        self.shift = TokenShift(model.hidden_size, exponent) if model.shifts_feed_forward else None
        self.expand = nn.Linear(model.hidden_size, model.ffn_width, bias=False)
        self.contract = nn.Linear(model.ffn_width, model.hidden_size, bias=False)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x [B, T, d] normed -> [B, T, d]."""
        if self.shift is None:
            return segment(self.recompute, self._activate, x)
        (halo,) = context.halo(f"{self.name}.shift", (x,), 1)
        return segment(self.recompute, self._shift_and_activate, x, halo)

    def _shift_and_activate(self, x: Tensor, halo: Tensor) -> Tensor:
        assert self.shift is not None
        difference = difference_to_previous(x, halo, first=torch.zeros_like(x[:, :1]))
        return self._activate(self.shift(x, difference))

    def _activate(self, x: Tensor) -> Tensor:
        return self.contract(torch.relu(self.expand(x)).square())

    def initialise(self, generator: torch.Generator) -> None:
        orthogonal_(self.expand.weight, 1.0, generator)
        nn.init.zeros_(self.contract.weight)
