"""Held-out loss, whole and by position, the same number at every layout."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from kvm_dist.data.loader import MicroBatch
from kvm_dist.sequence_split import SequenceSplit
from models.loss import IGNORED_LABEL
from parallel import collectives

POSITION_BLOCKS = 32
LOSS_CHUNK = 1024  # tokens whose logits are formed at a time: enough to keep a GPU busy


@dataclass(frozen=True)
class ValidationResult:
    """Mean loss in nats a token; `position_losses[i]` is that of the i-th block of `block_tokens` tokens."""

    loss: float
    tokens: int
    block_tokens: int
    position_losses: tuple[float, ...]


@torch.no_grad()
def validate(
    model: nn.Module, batches: Iterable[MicroBatch], split: SequenceSplit, loss_chunk: int | None = None
) -> ValidationResult:
    """Collective: every rank calls it with its data rank's share of the same batches.

    loss_chunk: tokens whose logits are formed at a time, those of training if it forms them so. Needs no
    more memory than a step on the same sequences.
    """
    block_tokens = max(1, -(-split.sequence_length // POSITION_BLOCKS))
    blocks = -(-split.sequence_length // block_tokens)
    totals = torch.zeros(2, blocks, dtype=torch.float64, device=split.device)  # summed losses, tokens
    positions = torch.arange(split.start, split.stop, device=split.device)
    block_of = positions.clamp(max=split.sequence_length - 1) // block_tokens  # pads count as 0 of the last
    for batch in batches:
        local_labels = split.labels(batch.labels)
        inputs = split.inputs(batch.inputs)
        losses = model(inputs, split.context(), local_labels, loss_chunk or LOSS_CHUNK, each=True)
        valid = (local_labels != IGNORED_LABEL).double()
        totals[0].index_add_(0, block_of, losses.double().sum(0))
        totals[1].index_add_(0, block_of, valid.sum(0))
        split.release()
    split.drain()
    totals = collectives.sum(totals).cpu()
    losses_by_block, tokens_by_block = totals.tolist()
    return ValidationResult(
        loss=sum(losses_by_block) / max(sum(tokens_by_block), 1.0),
        tokens=int(sum(tokens_by_block)),
        block_tokens=block_tokens,
        position_losses=tuple(
            loss / count for loss, count in zip(losses_by_block, tokens_by_block, strict=True) if count
        ),
    )
