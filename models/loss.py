"""The training loss as a sum and a count, so that it is normalised once over all ranks and micro-batches."""

import torch.nn.functional as F
from torch import Tensor

IGNORED_LABEL = -100


def token_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of logits [B, T, V] against labels [B, T], position t against labels[t].

    Returns the sum over valid tokens (float32, 0-dim) and their number (int64, 0-dim).
    """
    valid = (labels != IGNORED_LABEL).sum()
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"), valid


def each_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each token, [B, T] in float32; 0 where a label is ignored."""
    flat = logits.flatten(0, 1).float()
    losses = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
    return losses.view_as(labels)
