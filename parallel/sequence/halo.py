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
    min(count, start) earlier tokens [B, n, ...]. A shard shorter than `count` passes on what came before it.
    """
    length = tensors[0].shape[1]
    if any(tensor.shape[1] != length for tensor in tensors):
        lengths = [tensor.shape[1] for tensor in tensors]
        raise ValueError(f"halo {name!r}: tensors of {lengths} tokens; wanted the same number in all")
    if count == 0:
        return tuple(tensor[:, :0] for tensor in tensors)
    received, sent = min(count, start), min(count, start + length)
    halo: tuple[Tensor, ...] = _Halo.apply(exchange, name, sent, received, *tensors)
    return halo


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, name: str, sent: int, received: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        passed = max(sent - tensors[0].shape[1], 0)  # of the tokens received
        if exchange.has_next and not passed:
            exchange.send_next(name, tuple(tensor[:, -sent:] for tensor in tensors))
        like = tuple(tensor.new_empty(tensor.shape[0], received, *tensor.shape[2:]) for tensor in tensors)
        halo = exchange.receive_previous(name, like) if exchange.has_previous else like
        if exchange.has_next and passed:
            both = zip(halo, tensors, strict=True)
            exchange.send_next(name, tuple(torch.cat([h[:, -passed:], own], dim=1) for h, own in both))
        ctx.exchange, ctx.name, ctx.sent, ctx.passed = exchange, name, sent, passed
        ctx.floating = [tensor.is_floating_point() for tensor in tensors]
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.mark_non_differentiable(*(tensor for tensor in halo if not tensor.is_floating_point()))
        return halo

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        owed = [g for g, floating in zip(gradients, ctx.floating, strict=True) if floating]
        shapes = [shape for shape, floating in zip(ctx.shapes, ctx.floating, strict=True) if floating]
        if ctx.exchange.has_previous and not ctx.passed:
            ctx.exchange.send_previous(gradient_name(ctx.name), tuple(owed))
        whole = [gradient.new_zeros(shape) for gradient, shape in zip(owed, shapes, strict=True)]
        if ctx.exchange.has_next:
            owed = _take_gradients(ctx, owed, whole)
        if ctx.exchange.has_previous and ctx.passed:
            ctx.exchange.send_previous(gradient_name(ctx.name), tuple(owed))
        returned = iter(whole)
        return (None, None, None, None, *[next(returned) if floating else None for floating in ctx.floating])


def _take_gradients(ctx: Any, owed: list[Tensor], whole: list[Tensor]) -> list[Tensor]:
    """Fill `whole` from the rank after; returns `owed` with the gradients of what was passed on added."""
    passed, own = ctx.passed, ctx.sent - ctx.passed
    like = tuple(tensor.new_empty(tensor.shape[0], ctx.sent, *tensor.shape[2:]) for tensor in whole)
    arrived = ctx.exchange.receive_next(gradient_name(ctx.name), like)
    for tensor, gradient in zip(whole, arrived, strict=True):
        tensor[:, tensor.shape[1] - own :] = gradient[:, passed:]
    if not passed:
        return owed
    added = [gradient.clone() for gradient in owed]
    for gradient, later in zip(added, arrived, strict=True):
        gradient[:, -passed:] += later[:, :passed]
    return added
