"""A state handed from rank to rank along the sequence, its gradient handed back.

Deadlock cannot arise: sends never block, a forward waits only for the rank before and a backward only for the
rank after. Autograd runs the latest created of the ready nodes first, so the messages of the backward leave
in one order on all ranks as long as a layer asks for its halos before it receives, receives before it sends.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.sequence.context import Exchange


def receive_state(exchange: Exchange, name: str, zeros: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The state sent under `name` by the rank before, of the shapes and dtypes of `zeros`; else `zeros`.

    Use at least one of the received tensors, or the rank before waits for a gradient.
    """
    if not exchange.has_previous:
        return zeros
    received: tuple[Tensor, ...] = _Receive.apply(exchange, name, _anchor(zeros[0]), *zeros)
    return received


def send_state(exchange: Exchange, name: str, state: tuple[Tensor, ...], tie: Tensor) -> Tensor:
    """Send the state to the rank after. The gradient of the state comes back through the returned `tie`.

    Without a rank after, the tie alone is made: what led to the state gets a gradient on every rank.
    """
    handed_on: Tensor = _Send.apply(exchange, name, _anchor(tie), tie, *state)
    return handed_on


def _anchor(like: Tensor) -> Tensor:
    """A leaf that wants a gradient, so that autograd records the hand-over on both ranks or on neither."""
    return torch.zeros((), device=like.device, requires_grad=torch.is_grad_enabled())


def gradient_name(name: str) -> str:
    return f"{name} gradient"


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, name: str, anchor: Tensor, *zeros: Tensor
    ) -> tuple[Tensor, ...]:
        received = exchange.receive_previous(name, zeros)
        ctx.exchange, ctx.name = exchange, name
        ctx.floating = [index for index, tensor in enumerate(received) if tensor.is_floating_point()]
        ctx.count = len(received)
        ctx.mark_non_differentiable(*(tensor for tensor in received if not tensor.is_floating_point()))
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent = tuple(gradients[index] for index in ctx.floating)
        ctx.exchange.send_previous(gradient_name(ctx.name), sent)
        return (None, None, None, *[None] * ctx.count)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, name: str, anchor: Tensor, tie: Tensor, *state: Tensor
    ) -> Tensor:
        if exchange.has_next:
            exchange.send_next(name, state)
        ctx.exchange, ctx.name = exchange, name
        ctx.like = [torch.empty_like(t, device="meta") if t.is_floating_point() else None for t in state]
        ctx.device = tie.device
        return tie.view_as(tie)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tie_gradient: Tensor) -> tuple[Tensor | None, ...]:
        like = tuple(tensor for tensor in ctx.like if tensor is not None)
        if ctx.exchange.has_next:
            arrived = iter(ctx.exchange.receive_next(gradient_name(ctx.name), like))
        else:
            arrived = iter(torch.zeros_like(tensor, device=ctx.device) for tensor in like)
        gradients = [None if tensor is None else next(arrived) for tensor in ctx.like]
        return (None, None, None, tie_gradient, *gradients)
