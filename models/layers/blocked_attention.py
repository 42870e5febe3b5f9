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


def pieces(start: int, tokens: int, block: int, shared_from: int) -> list[Piece]:
    """Cut [start, start + tokens) at multiples of `block`; whole blocks from position `shared_from` on share
    one mask and form one run."""
    found = []
    position, end = start, start + tokens
    while position < end:
        length = min(block - position % block, end - position)
        count = 1
        if length == block and position >= shared_from:
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
    sinks: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of each token at position t to tokens in [oldest(t), t], scale 1/sqrt(D) -> [B, T, H, D].

    heads: [B, T, H, D] from position `start` on. before: earlier keys and values [B, n, H, D]. A block reads
    its own keys and the `reach` before its edge, a multiple of `block`; oldest(t) must not lie before them.
    sinks: keys and values [B, S, H, D] of the first tokens of the sequence, read besides.
    """
    first = sinks or tuple(z[:, :0] for z in before)
    margin = max(reach, before[0].shape[1])  # keys[:, i] stands at position start - margin + i
    keys, values = (_padded(*pair, margin) for pair in zip(before, (heads.key, heads.value), strict=True))
    outs = []
    for piece in pieces(start, heads.query.shape[1], block, reach + first[0].shape[1]):
        stop = piece.offset + piece.length * piece.count
        low = piece.offset + margin - reach if piece.aligned else 0
        query = _runs(heads.query[:, piece.offset : stop], piece.length, piece.count)
        size = piece.offset + margin + piece.length - low
        key, value = (
            _key_ranges(z, low, size, piece, sink) for z, sink in zip((keys, values), first, strict=True)
        )
        position = torch.arange(piece.length, device=query.device).unsqueeze(1) + start + piece.offset
        mask = _mask(position, start - margin + low, size, first[0].shape[1], oldest(position))
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


def _key_ranges(z: Tensor, low: int, size: int, piece: Piece, sinks: Tensor) -> Tensor:
    """The sinks, then the keys of every run: `size` from `low` on, moved by one block per run
    -> [B*count, H, S + size, D]."""
    span = piece.length * piece.count
    steps = range(low, low + size, piece.length) if piece.count > 1 else [low]
    width = piece.length if piece.count > 1 else size
    parts = [z[:, at : at + max(span, width)].unflatten(1, (piece.count, width)) for at in steps]
    if sinks.shape[1]:
        parts = [sinks.unsqueeze(1).expand(-1, piece.count, -1, -1, -1), *parts]
    ranges = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)  # [B, count, S + size, H, D]
    return ranges.flatten(0, 1).transpose(1, 2)


def _mask(query: Tensor, first_key: int, keys: int, sinks: int, oldest: Tensor) -> Tensor:
    """Which keys the queries at positions query [Q, 1] may see: the sinks that the range leaves out, then the
    range from `first_key` on -> bool [Q, sinks + keys]."""
    sink = torch.arange(sinks, device=query.device)
    key = torch.arange(first_key, first_key + keys, device=query.device)
    in_range = (key >= 0) & (key >= oldest) & (key <= query)
    return torch.cat([sink < oldest, in_range], dim=1)
