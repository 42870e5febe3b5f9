"""The operator as one autograd Function around the passes of kernels: only routes are kept per chunk."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.kvm.handover import Handover
from models.kvm.kernels.advance import Routes, advance
from models.kvm.kernels.attend import attend, walk_to_end
from models.kvm.kernels.gradients import Gradients, Saved
from models.kvm.kernels.operands import Operands, SlotTensors, operands
from models.kvm.layout import KVMSettings, Plan
from models.kvm.tokens import Tokens


@dataclass(frozen=True)
class Call:
    """What a call is about, beside its tensors."""

    settings: KVMSettings
    plan: Plan
    handover: Handover
    returns_state: bool


@dataclass(frozen=True)
class CallTensors:
    """The tensor arguments of `TritonFunction`, in its order."""

    q: Tensor  # [B, T, H, D]
    k: Tensor
    v: Tensor
    gate: Tensor | None  # [B, T, H]
    norm_weight: Tensor  # [D]
    norm_bias: Tensor
    state_temperature: Tensor | None  # [H]
    window_temperature: Tensor | None
    slot_keys: Tensor | None = None  # [B, H, m, D] before the call; None where the rank before has it
    slot_values: Tensor | None = None
    slot_magnitudes: Tensor | None = None  # [B, H, m]
    window_keys: Tensor | None = None  # [B, w, H, D], the tokens before the call that it reads or folds
    window_values: Tensor | None = None
    window_gate: Tensor | None = None  # [B, w, H]

    def all(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, one.name) for one in fields(self))

    def operands(self, call: Call) -> Operands:
        return operands(
            self.q,
            (self.window_keys, self.k),
            (self.window_values, self.v),
            (self.window_gate, self.gate),
            (self.norm_weight, self.norm_bias),
            (self.state_temperature, self.window_temperature),
            call.settings,
            call.plan,
        )

    def boundary(self) -> SlotTensors:
        """[rows, m, .] before the call; no slots at the start of a sequence."""
        batch, _, heads, width = self.q.shape
        empty = self.norm_weight.new_empty(batch * heads, 0, width)
        return (
            empty if self.slot_keys is None else self.slot_keys.flatten(0, 1).contiguous(),
            empty if self.slot_values is None else self.slot_values.flatten(0, 1).contiguous(),
            empty[..., 0]
            if self.slot_magnitudes is None
            else self.slot_magnitudes.flatten(0, 1).contiguous(),
        )


class TritonFunction(torch.autograd.Function):
    """Of a `Call` and the tensors of `CallTensors`: the output [B, T, H, D] and, if wanted, the slots."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> Tensor | tuple[Tensor, ...]:
        given = _with_window_before(call, CallTensors(*tensors))
        work = given.operands(call)
        routes, given = _advance(call, given, work)
        output, log_sum, slots = attend(work, routes, given.boundary())
        ctx.call = call
        ctx.save_for_backward(*given.all(), routes.order, routes.codes, output, log_sum)
        ctx.set_materialize_grads(False)
        if not call.returns_state:
            return output
        per_head = (given.q.shape[0], given.q.shape[2])
        return output, *(tensor.unflatten(0, per_head) for tensor in slots)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: Tensor | None, *grad_state: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *tensors, order, codes, output, log_sum = ctx.saved_tensors
        call, given = ctx.call, CallTensors(*tensors)
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output.contiguous()
        with torch.autocast(output.device.type, enabled=False), torch.cuda.device_of(output):
            work = given.operands(call)
            saved = Saved(Routes(order, codes), given.boundary(), output, log_sum)
            found = Gradients(work, saved, grad_output.to(output.dtype))
            boundary = _Backward(call, work, found, grad_state).run()
            per_head = (given.q.shape[0], given.q.shape[2])
            before, local = _pieces(work, found)
            result = (
                found.q,
                *local,
                *found.norm,
                *found.temperatures.unbind(1),
                *(tensor.unflatten(0, per_head) for tensor in boundary),
                *before,
            )
        return None, *(
            grad.to(tensor.dtype) if wanted and grad is not None and tensor is not None else None
            for wanted, grad, tensor in zip(ctx.needs_input_grad[1:], result, given.all(), strict=True)
        )


def _pieces(work: Operands, found: Gradients) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of k, v and gate before the call, and in it."""
    edge = work.tokens - work.queries
    joined = (found.k, found.v, found.gate)
    return (
        [None if one is None else one[:, :edge] for one in joined],
        [None if one is None else one[:, edge:] for one in joined],
    )


def _with_window_before(call: Call, given: CallTensors) -> CallTensors:
    """Send the window that the next rank needs, and add the one that the rank before sends."""
    handover, start = call.handover, call.plan.start

    def send() -> None:
        pairs = (
            (given.window_keys, given.k),
            (given.window_values, given.v),
            (given.window_gate, given.gate),
        )
        handover.send_window(tuple(Tokens(before, one, start) for before, one in pairs if one is not None))

    if handover.has_next and handover.edge_is_local:
        send()
    if handover.has_previous:
        local = (given.k, given.v, *(() if given.gate is None else (given.gate,)))
        names = ("window_keys", "window_values", "window_gate")
        given = replace(given, **dict(zip(names, handover.receive_window(local), strict=False)))
    if handover.has_next and not handover.edge_is_local:
        send()
    return given


def _advance(call: Call, given: CallTensors, work: Operands) -> tuple[Routes, CallTensors]:
    """Route all folds and pass on the state, S_K first: everything the next rank waits for."""
    handover = call.handover
    if handover.has_previous:
        keys = handover.receive_keys(given.q, torch.float32)
        given = replace(given, slot_keys=keys.permute(1, 2, 0, 3))
    routes, sums = advance(work, given.boundary()[0])
    if handover.has_next:
        handover.send_keys(_slots_first(sums, given.q))
    if handover.has_previous:
        values, magnitudes = handover.receive_values(given.q, torch.float32)
        given = replace(
            given, slot_values=values.permute(1, 2, 0, 3), slot_magnitudes=magnitudes.permute(1, 2, 0)
        )
    if handover.has_next:
        _, values, magnitudes = walk_to_end(work, routes, given.boundary())
        handover.send_values(_slots_first(values, given.q), _slots_first(magnitudes, given.q))
    return routes, given


def _slots_first(slots: Tensor, q: Tensor) -> Tensor:
    """[B * H, m, ...] as ranks exchange it, [m, B, H, ...]."""
    return slots.unflatten(0, (q.shape[0], q.shape[2])).movedim(2, 0).contiguous()


class _Backward:
    """The order of the backward: attention first, on all ranks at once; only sums wait for the rank after."""

    def __init__(
        self, call: Call, work: Operands, found: Gradients, grad_state: tuple[Tensor | None, ...]
    ) -> None:
        self.call, self.work, self.found, self.grad_state = call, work, found, grad_state
        self.before = work.tokens - work.queries
        # The place among the keys from which on they are needed by the next rank too.
        self.edge = call.handover.edge - call.plan.start + self.before

    def run(self) -> SlotTensors:
        """Fill the gradients; returns that of the state before the call, [rows, m, .]."""
        handover, found = self.call.handover, self.found
        found.window(0, self.edge)
        if not handover.edge_is_local:
            self._window_at_edge()
        if handover.has_previous:
            # A send may still read its buffer when the shares, which are sent by themselves, start anew.
            handover.send_window_gradient(self._tokens(found.k.clone(), found.v.clone()))
            for gradient in (found.k, found.v):
                gradient[:, : self.before] = 0
        boundary = found.states(self._later)
        shares = tuple(one for one in (found.k, found.v, found.gate) if one is not None)
        if handover.has_next and not handover.edge_is_local:
            handover.receive_share(self._tokens(*shares))
        if handover.has_previous:
            keys, values, magnitudes = (_slots_first(tensor, self.work.q) for tensor in boundary)
            handover.send_slot_gradient((keys, values, magnitudes))
            handover.send_share(self._tokens(*shares))
        if handover.has_next and handover.edge_is_local:
            handover.receive_share(self._tokens(*shares))
        return boundary

    def _window_at_edge(self) -> None:
        """Go on from the sums of the rank after, as one rank would have summed."""
        if not self.call.handover.has_next:
            return
        gradients = (self.found.k, self.found.v)
        later = self.call.handover.receive_window_gradient(self._tokens(*gradients))
        for gradient, sums in zip(gradients, later, strict=True):
            gradient[:, self.edge :] = sums
        self.found.window(self.edge, self.work.tokens)

    def _later(self) -> SlotTensors:
        """The gradient of the state after the call, [rows, S, .]."""
        handover, work, slots = self.call.handover, self.work, self.call.plan.slots_stop
        if handover.has_next:
            if handover.edge_is_local:
                self._window_at_edge()
            received = handover.receive_slot_gradient(work.q, torch.float32)
            keys, values, magnitudes = (
                tensor.movedim(0, 2).flatten(0, 1).contiguous() for tensor in received
            )
            return keys, values, magnitudes
        zeros = work.norm_weight.new_zeros(work.rows, slots, work.width)
        keys, values, magnitudes = (
            zero if grad is None else grad.flatten(0, 1).contiguous()
            for grad, zero in zip(self.grad_state or (None,) * 3, (zeros, zeros, zeros[..., 0]), strict=True)
        )
        return keys, values, magnitudes

    def _tokens(self, *gradients: Tensor) -> tuple[Tokens, ...]:
        """Views, as the hand-over wants them."""
        start = self.call.plan.start
        return tuple(Tokens(one[:, : self.before], one[:, self.before :], start) for one in gradients)
