"""Attention to all earlier tokens of a sequence whose keys and values travel from rank to rank.

Each rank sends its keys and values to the next and passes on those of the ranks before as they come, nearest
first, so that a message travels while the one before it is read. Gradients come back the same way, those of
the first rank, which have the longest way, first; each rank adds its share on top of what arrives.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.sequence.context import CausalAttention, Exchange
from parallel.sequence.relay import gradient_name

Pair = tuple[Tensor, Tensor]  # keys and values, or their gradients


def attend_by_chain(
    exchange: Exchange,
    name: str,
    attention: CausalAttention,
    lengths: Sequence[int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """query, key, value [B, T, H, D] of this rank -> [B, T, H, D].

    lengths: tokens of every rank before, in rank order. Keys and values of all of them are kept for the
    backward. Gradients travel in float32 at least: they are sums over ranks.
    """
    output: Tensor = _Chain.apply(exchange, name, attention, tuple(lengths), query, key, value)
    return output


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: Exchange,
        name: str,
        attention: CausalAttention,
        lengths: tuple[int, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        if exchange.has_next:
            exchange.send_next(name, (key, value))
        joined = attention.part(query, key, value, causal=True)
        earlier: list[Tensor] = []
        for length in reversed(lengths):
            like = tuple(z.new_empty(z.shape[0], length, *z.shape[2:]) for z in (key, value))
            pair = exchange.receive_previous(name, like)
            if exchange.has_next:
                exchange.send_next(name, pair)
            joined = attention.join(joined, attention.part(query, pair[0], pair[1], causal=False))
            earlier += pair
        output, log_sum = joined
        output = output.to(query.dtype)
        ctx.exchange, ctx.name, ctx.attention = exchange, name, attention
        ctx.save_for_backward(query, output, log_sum, key, value, *earlier)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, output, log_sum, *pairs = ctx.saved_tensors
        dtype = torch.promote_types(query.dtype, torch.float32)
        dquery = torch.zeros_like(query, dtype=dtype)

        def through(index: int) -> Pair:
            """Gradients of the keys and values `index` ranks before, this rank's share and all later ones."""
            dq, dk, dv = ctx.attention.part_backward(
                gradient, query, *pairs[2 * index : 2 * index + 2], output, log_sum, causal=index == 0
            )
            dquery.add_(dq)
            return _with_later_ranks(ctx.exchange, ctx.name, (dk.to(dtype), dv.to(dtype)))

        for index in reversed(range(1, len(pairs) // 2)):
            ctx.exchange.send_previous(gradient_name(ctx.name), through(index))
        dkey, dvalue = through(0)
        return None, None, None, None, *(z.to(query.dtype) for z in (dquery, dkey, dvalue))


def _with_later_ranks(exchange: Exchange, name: str, own: Pair) -> Pair:
    if not exchange.has_next:
        return own
    key, value = exchange.receive_next(gradient_name(name), own)
    return key + own[0], value + own[1]
