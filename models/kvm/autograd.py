"""The operator as one autograd Function: nothing is kept per chunk but the routes of its tokens.

The order of its steps, and of its messages, is here, for every backend.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.kvm.call import Attended, Call, CallTensors, Gradients, Passes, Routes, SlotChain
from models.kvm.node import advance_by_heads
from models.kvm.rewind import SlotTensors
from models.precision import without_autocast

_TENSORS = len(CallTensors.__dataclass_fields__)


class KVMFunction(torch.autograd.Function):
    """Of a `Call` and the tensors of `CallTensors`: the output, as the queries, and, if wanted, the slots."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> Tensor | tuple[Tensor, ...]:
        given, attended = run_forward(call, CallTensors(*tensors))
        ctx.call = call
        ctx.save_for_backward(*given.all(), attended.output, attended.log_sum, *attended.routes)
        ctx.set_materialize_grads(False)
        return (attended.output, *attended.slots) if call.returns_state else attended.output

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: Tensor | None, *grad_state: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        call, given = ctx.call, CallTensors(*saved[:_TENSORS])
        output, log_sum, *routes = saved[_TENSORS:]
        attended = Attended(output, log_sum, tuple(routes), given.boundary())
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        found = run_backward(call, given, attended, grad_output, grad_state)
        gradients = [
            grad.to(tensor.dtype) if wanted and grad is not None and tensor is not None else None
            for wanted, grad, tensor in zip(ctx.needs_input_grad[1:], found.all(), given.all(), strict=True)
        ]
        if call.arrivals is not None:
            call.arrivals.return_tokens(*gradients[1:4])
            gradients[:4] = [None] * 4
        return None, *gradients


def run_forward(call: Call, given: CallTensors) -> tuple[CallTensors, Attended]:
    """The tensors with what the rank before sent, and what attention leaves."""
    if call.arrivals is not None:
        call.arrivals.wait_for_tokens()
    given = _with_window_before(call, given)
    passes = call.passes(call, given)
    node = call.handover.node
    routes: Routes | None
    if node is None:
        routes, given = _advance(call, given, passes)
    else:
        routes, given = advance_by_heads(call, given, passes, node)
    if call.arrivals is not None:
        if routes is None:  # there is time to find them
            routes, _ = passes.route(slice(0, given.heads), given.boundary()[0])
        call.arrivals.wait_for_queries()
    return given, passes.attend(routes, given.boundary())


def run_backward(
    call: Call,
    given: CallTensors,
    attended: Attended,
    grad_output: Tensor,
    grad_state: tuple[Tensor | None, ...] = (),
) -> CallTensors:
    """Gradients of everything given. Attention comes first, on all ranks at once; only sums wait."""
    handover = call.handover
    with without_autocast(grad_output.device), torch.cuda.device_of(grad_output):
        passes = call.passes(call, given)
        found = passes.gradients(attended, grad_output.contiguous(), handover.edge)
        found.window()
        if not handover.edge_is_local:
            found.window_at_edge(handover.receive_window_gradient(found.tokens[:2]))
        if handover.has_previous:
            handover.send_window_gradient(found.tokens[:2])
        boundary = found.states(_chain(call, given, found, grad_state))
        if handover.has_next and not handover.edge_is_local:
            handover.receive_share(found.tokens)
        if handover.has_previous:
            handover.send_share(found.tokens)
        if handover.has_next and handover.edge_is_local:
            handover.receive_share(found.tokens)
        return found.result(boundary)


def _with_window_before(call: Call, given: CallTensors) -> CallTensors:
    """Send the window that the next rank needs, and add the one that the rank before sends."""
    handover, start = call.handover, call.plan.start
    if handover.has_next and handover.edge_is_local:
        handover.send_window(given.tokens(start))
    if handover.has_previous:
        local = (given.k, given.v, *(() if given.gate is None else (given.gate,)))
        names = ("window_keys", "window_values", "window_gate")
        given = replace(given, **dict(zip(names, handover.receive_window(local), strict=False)))
    if handover.has_next and not handover.edge_is_local:
        handover.send_window(given.tokens(start))
    return given


def _advance(call: Call, given: CallTensors, passes: Passes) -> tuple[Routes | None, CallTensors]:
    """Where a rank follows: route all folds and pass on the state, S_K first, which is all it waits for."""
    handover = call.handover
    groups = handover.head_groups(given.heads)
    keys, values, routes = [], [], []
    for heads in groups:
        before = given.boundary()[0][:, :, heads]
        if handover.has_previous:
            before = handover.receive_keys(given.k[:, :, heads], given.accumulation_dtype)
            keys.append(before)
        if handover.has_next:
            found, sums = passes.route(heads, before)
            handover.send_keys(sums)
            routes.append(found)
    for place, heads in enumerate(groups):
        before_values = tuple(tensor[:, :, heads] for tensor in given.boundary()[1:])
        if handover.has_previous:
            before_values = handover.receive_values(given.k[:, :, heads], given.accumulation_dtype)
            values.append(before_values)
        if handover.has_next:
            handover.send_values(*passes.sum_values(heads, routes[place], *before_values))
    if handover.has_previous:
        slots = (keys, *zip(*values, strict=True))
        names = ("slot_keys", "slot_values", "slot_magnitudes")
        joined = (one[0] if len(groups) == 1 else torch.cat(tuple(one), dim=2) for one in slots)
        given = replace(given, **dict(zip(names, joined, strict=True)))
    return passes.join_routes(routes) if handover.has_next else None, given


def _chain(
    call: Call, given: CallTensors, found: Gradients, grad_state: tuple[Tensor | None, ...]
) -> SlotChain:
    """How the running gradient of the slots comes from the rank after, or from the state returned."""
    handover, groups = call.handover, call.handover.head_groups(given.heads)

    def receive(heads: slice) -> SlotTensors:
        if not handover.has_next:
            return _or_zeros(grad_state, call.plan.slots_stop, given, heads)
        if handover.edge_is_local and heads == groups[0]:
            found.window_at_edge(handover.receive_window_gradient(found.tokens[:2]))
        return handover.receive_slot_gradient(given.k[:, :, heads], given.accumulation_dtype)

    def send(heads: slice, gradient: SlotTensors) -> None:
        if handover.has_previous:
            handover.send_slot_gradient(gradient)

    def queries_done() -> None:
        if call.arrivals is not None:
            call.arrivals.return_queries(found.queries.to(given.q.dtype))

    return SlotChain(groups, handover.has_next, handover.has_previous, queries_done, receive, send)


def _or_zeros(grads: tuple[Tensor | None, ...], slots: int, given: CallTensors, heads: slice) -> SlotTensors:
    """Gradients of the returned slots [m, B, h, D], [m, B, h, D], [m, B, h], where there are any."""
    k = given.k[:, :, heads]
    zeros = given.norm_weight.new_zeros(slots, k.shape[0], *k.shape[2:])
    keys, values, magnitudes = grads or (None, None, None)
    return (
        zeros if keys is None else keys[:, :, heads],
        zeros if values is None else values[:, :, heads],
        zeros[..., 0] if magnitudes is None else magnitudes[:, :, heads],
    )
