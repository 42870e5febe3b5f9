"""Sequences of any length read in pieces: memory holds the logits of one piece, not of a document."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from models.backbone import Backbone
from models.cache import CachedSequence, read
from models.loss import IGNORED_LABEL

LONGEST_PIECE = 2048  # tokens of a row; attention over all tokens writes out a mask of [piece, tokens read]
_SHORTEST_PIECE = 64
_LOGITS_BYTES = 256 << 20
_TOKENS_AT_ONCE = {"cpu": 8192, "cuda": 65_536}


def device_of(model: Backbone) -> torch.device:
    return model.embedding.weight.device


def rows_at_once(model: Backbone, tokens: int) -> int:
    """Sequences of `tokens` tokens that are read together: many short ones, one long one."""
    return max(1, _TOKENS_AT_ONCE[device_of(model).type] // tokens)


def piece_tokens(model: Backbone, rows: int) -> int:
    """Tokens of each row that are read at once, so that float32 logits stay small; whole KVM chunks."""
    fitting = _LOGITS_BYTES // (4 * rows * model.config.vocab_size)
    piece = max(_SHORTEST_PIECE, min(LONGEST_PIECE, fitting))
    multiple = model.config.position_multiple
    return piece // multiple * multiple or piece


@torch.no_grad()
def next_token_losses(model: Backbone, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Losses [B, T] in float32 nats of labels [B, T] after input_ids [B, T]; 0 where a label is ignored."""
    return torch.cat([losses for losses, _ in _scored(model, input_ids, labels)], dim=1)


@torch.no_grad()
def losses_and_hits(model: Backbone, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses as `next_token_losses` gives them, and whether each label is the most likely token, [B, T]."""
    losses, hits = [], []
    for found, likeliest in _scored(model, input_ids, labels):
        losses.append(found)
        hits.append(likeliest)
    wanted = labels.to(device_of(model))
    return torch.cat(losses, dim=1), torch.cat(hits, dim=1) == wanted


def _scored(model: Backbone, input_ids: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Losses and most likely tokens of one piece after another, both [B, piece]."""
    cache = CachedSequence()
    for ids, wanted in _pieces(model, input_ids, labels):
        logits = read(model, ids, cache).float()
        losses = F.cross_entropy(
            logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
        )
        yield losses.view_as(wanted), logits.argmax(-1)


@torch.no_grad()
def read_prompts(model: Backbone, prompts: Tensor) -> tuple[CachedSequence, Tensor]:
    """prompts [B, T], T at least 1 -> what the model keeps of them, and the logits [B, V] that follow."""
    cache = CachedSequence()
    logits = prompts.new_zeros(0)
    for (ids,) in _pieces(model, prompts):
        logits = read(model, ids, cache)[:, -1]
    return cache, logits


@torch.no_grad()
def write_on(
    model: Backbone,
    prompts: Tensor,
    tokens: int,
    finished: Callable[[int, list[int]], bool],
    choose: Callable[[Tensor], Tensor] = lambda logits: logits.argmax(-1),
) -> list[list[int]]:
    """What the model puts after each of prompts [B, T]: up to `tokens` ids a row.

    finished(row, ids) ends a row early. choose: logits [B, V] -> ids [B]; the most likely one by default.
    """
    cache, logits = read_prompts(model, prompts)
    written: list[list[int]] = [[] for _ in range(prompts.shape[0])]
    open_rows = set(range(prompts.shape[0]))
    while True:
        chosen = choose(logits.float())
        for row, token in enumerate(chosen.tolist()):
            if row in open_rows:
                written[row].append(token)
        open_rows = {row for row in open_rows if not finished(row, written[row])}
        if not open_rows or max(map(len, written)) >= tokens:
            return written
        logits = read(model, chosen.to(logits.device).unsqueeze(1), cache)[:, -1]


def _pieces(model: Backbone, *tensors: Tensor) -> Sequence[tuple[Tensor, ...]]:
    """Tensors [B, T], cut alike, on the model's device."""
    rows, tokens = tensors[0].shape
    step, device = piece_tokens(model, rows), device_of(model)
    return [
        tuple(tensor[:, start : start + step].to(device) for tensor in tensors)
        for start in range(0, tokens, step)
    ]
