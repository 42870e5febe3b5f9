"""The training loss as a sum and a count, so that it is normalised once over all ranks and micro-batches."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.segment import segment

IGNORED_LABEL = -100


def token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of logits [B, T, V] against labels [B, T], position t against labels[t].

    Returns the sum over valid tokens (float32, 0-dim) and their number (int64, 0-dim).
    """
    valid = (labels != IGNORED_LABEL).sum()
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"), valid


def loss_in_chunks(
    head: Callable[[Tensor], Tensor], features: Tensor, labels: Tensor, chunk_tokens: int
) -> Tensor:
    """The sum of `token_losses(head(features), labels)`, with logits of `chunk_tokens` tokens at a time.

    features [B, T, d], labels [B, T]. The backward forms each chunk's logits again.
    """

    def of_chunk(part: Tensor, wanted: Tensor) -> Tensor:
        return token_losses(head(part), wanted)[0]

    total = features.new_zeros((), dtype=torch.float32)
    parts = features.flatten(0, 1).split(chunk_tokens), labels.flatten().split(chunk_tokens)
    for part, wanted in zip(*parts, strict=True):
        total = total + segment(True, of_chunk, part[None], wanted[None])
    return total
