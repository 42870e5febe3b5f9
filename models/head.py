"""The head: logits of what the backbone gives, or their losses without all logits at once."""

import torch
from torch import Tensor, nn

from models.layers.segment import segment
from models.loss import each_token_loss, token_losses


class Head(nn.Linear):
    """One call, however many chunks it takes: ZeRO-3 gathers a weight once a call, on all ranks together,
    and ranks with shards of unequal length have unequal numbers of chunks."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)

    def forward(
        self, input: Tensor, labels: Tensor | None = None, chunk: int | None = None, each: bool = False
    ) -> Tensor:
        """input [B, T, d] -> logits [B, T, V].

        With labels [B, T] the sum of the losses against them, 0-dim, or with `each` the loss of every token,
        [B, T]; float32 both, 0 where a label is ignored. Logits are of `chunk` tokens at a time (None: all),
        and the backward forms them again.
        """
        if labels is None:
            return super().forward(input)
        size, of_part = chunk or labels.numel(), self._each if each else self._sum
        parts = zip(input.flatten(0, 1).split(size), labels.flatten().split(size), strict=True)
        losses = (segment(True, of_part, part[None], wanted[None]) for part, wanted in parts)
        if each:
            return torch.cat(list(losses), dim=1).view_as(labels)
        return sum(losses, start=input.new_zeros((), dtype=torch.float32))

    def _sum(self, part: Tensor, labels: Tensor) -> Tensor:
        return token_losses(super().forward(part), labels)[0]

    def _each(self, part: Tensor, labels: Tensor) -> Tensor:
        return each_token_loss(super().forward(part), labels)
