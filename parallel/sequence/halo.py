"""The last tokens of the rank before, their gradient handed back. See relay.py for the order of messages."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.sequence.context import Exchange
from parallel.sequence.relay import gradient_name


def exchange_halo(
    exchange: Exchange, name: str, tensors: tuple[Tensor, ...], count: int, start: int
) -> tuple[Tensor, ...]:
    """Swap `count` tokens at the shard edges, all tensors in one message.

    tensors: each [B, T, ...] of this rank, whose first token is at `start`. Returns for each the last
    min(count, start) earlier tokens [B, n, ...]. Raises ValueError if a shard is shorter than `count`.
    """
    length = tensors[0].shape[1]
    if any(tensor.shape[1] != length for tensor in tensors):
        lengths = [tensor.shape[1] for tensor in tensors]
        raise ValueError(f"halo {name!r}: tensors of {lengths} tokens; wanted the same number in all")
    if count > length:
        raise ValueError(
            f"halo {name!r} wants the {count} tokens before a shard, but shards hold {length}: use longer "
            "sequences, fewer sequence ranks or a smaller window"
        )
    if count == 0:
        return tuple(tensor[:, :0] for tensor in tensors)
    halo: tuple[Tensor, ...] = _Halo.apply(exchange, name, count, min(count, start), *tensors)
    return halo


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, name: str, sent: int, received: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        if exchange.has_next:
            exchange.send_next(name, tuple(tensor[:, -sent:] for tensor in tensors))
        like = tuple(tensor.new_empty(tensor.shape[0], received, *tensor.shape[2:]) for tensor in tensors)
        halo = exchange.receive_previous(name, like) if exchange.has_previous else like
        ctx.exchange, ctx.name, ctx.sent = exchange, name, sent
        ctx.floating = [tensor.is_floating_point() for tensor in tensors]
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.mark_non_differentiable(*(tensor for tensor in halo if not tensor.is_floating_point()))
        return halo

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        owed = [
            (g, s) for g, s, floating in zip(gradients, ctx.shapes, ctx.floating, strict=True) if floating
        ]
        name = gradient_name(ctx.name)
        if ctx.exchange.has_previous:
            ctx.exchange.send_previous(name, tuple(gradient for gradient, _ in owed))
        whole = [gradient.new_zeros(shape) for gradient, shape in owed]
        if ctx.exchange.has_next:
            like = tuple(tensor[:, -ctx.sent :] for tensor in whole)
            for tensor, arrived in zip(like, ctx.exchange.receive_next(name, like), strict=True):
                tensor.copy_(arrived)
        returned = iter(whole)
        return (None, None, None, None, *[next(returned) if floating else None for floating in ctx.floating])
