"""Causal attention in fixed blocks of queries, each with a fixed range of keys.

The rounding of a softmax row depends on the range of keys it is given. Blocks and ranges that are functions
of the position alone give the same bits however a sequence is cut at block edges.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.attention import QueriesKeysValues


@dataclass(frozen=True)
class Piece:
    """`count` runs of `length` queries that start `offset` tokens after the first local one."""

    offset: int
    length: int
    count: int
    aligned: bool  # starts at a block edge


def pieces(start: int, tokens: int, block: int, reach: int) -> list[Piece]:
    """Cut [start, start + tokens) at multiples of `block`; whole blocks whose `reach` keys before their edge
    all exist share one mask and form one run."""
    found = []
    position, end = start, start + tokens
    while position < end:
        length = min(block - position % block, end - position)
        count = 1
        if length == block and position >= reach:
            count = (end - position) // block
        found.append(Piece(position - start, length, count, position % block == 0))
        position += length * count
    return found


def blocked_attention(
    heads: QueriesKeysValues,
    before: tuple[Tensor, Tensor],
    start: int,
    block: int,
    reach: int,
    oldest: Callable[[Tensor], Tensor],
) -> Tensor:
    """Attention of each token at position t to tokens in [oldest(t), t], scale 1/sqrt(D) -> [B, T, H, D].

    heads: [B, T, H, D] from position `start` on. before: earlier keys and values [B, n, H, D]. A block reads
    its own keys and the `reach` before its edge, a multiple of `block`; oldest(t) must not lie before them.
    """
    margin = max(reach, before[0].shape[1])  # keys[:, i] stands at position start - margin + i
    keys, values = (_padded(*pair, margin) for pair in zip(before, (heads.key, heads.value), strict=True))
    outs = []
    for piece in pieces(start, heads.query.shape[1], block, reach):
        stop = piece.offset + piece.length * piece.count
        low = piece.offset + margin - reach if piece.aligned else 0
        query = _runs(heads.query[:, piece.offset : stop], piece.length, piece.count)
        size = piece.offset + margin + piece.length - low
        key, value = (_key_ranges(z, low, size, piece) for z in (keys, values))
        first_query = start + piece.offset
        mask = _mask(first_query, piece.length, start - margin + low, size, oldest, query.device)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)  # [B*count, H, length, D]
        outs.append(out.transpose(1, 2).reshape(-1, piece.length * piece.count, *heads.query.shape[2:]))
    return torch.cat(outs, dim=1)


def _padded(earlier: Tensor, own: Tensor, margin: int) -> Tensor:
    batch, held = earlier.shape[:2]
    zeros = own.new_zeros(batch, margin - held, *own.shape[2:])
    return torch.cat([zeros, earlier, own], dim=1)


def _runs(z: Tensor, length: int, count: int) -> Tensor:
    """[B, count*length, H, D] -> [B*count, H, length, D]."""
    return z.unflatten(1, (count, length)).flatten(0, 1).transpose(1, 2)


def _key_ranges(z: Tensor, low: int, size: int, piece: Piece) -> Tensor:
    """The keys of every run: `size` from `low` on, moved by one block per run -> [B*count, H, size, D]."""
    if piece.count == 1:
        return z[:, low : low + size].transpose(1, 2)
    span = piece.length * piece.count
    parts = [z[:, at : at + span] for at in range(low, low + size, piece.length)]
    blocks = [part.unflatten(1, (piece.count, piece.length)) for part in parts]
    return torch.cat(blocks, dim=2).flatten(0, 1).transpose(1, 2)


def _mask(
    first_query: int,
    queries: int,
    first_key: int,
    keys: int,
    oldest: Callable[[Tensor], Tensor],
    device: torch.device,
) -> Tensor:
    """Which keys are visible: bool [queries, keys]."""
    query = torch.arange(first_query, first_query + queries, device=device).unsqueeze(1)
    key = torch.arange(first_key, first_key + keys, device=device)
    return (key >= 0) & (key >= oldest(query)) & (key <= query)
