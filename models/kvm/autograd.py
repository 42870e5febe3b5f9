"""The operator as one autograd Function: nothing is kept per chunk but the routes of its tokens."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.kvm.advance import CallTokens, Router
from models.kvm.attend import Queries, attend, replay
from models.kvm.gradients import (
    CallGradients,
    ReadBackward,
    SlotGradient,
    StateReads,
    WindowBackward,
)
from models.kvm.handover import Handover
from models.kvm.layout import Fold, KVMSettings, Plan
from models.kvm.memory import KeyMemory, KeyNorm, RoutedTokens, ValueMemory
from models.kvm.rewind import SlotTensors
from models.kvm.state import accumulation_dtype
from models.kvm.tokens import Tokens

# Gradients that reads send to the slots wait for those of the rank after, which are summed first. Beyond
# this many bytes a rank waits instead of going on.
WAITING_BYTES = 2**30

RoutedFolds = list[tuple[Fold, RoutedTokens]]  # newest first


@dataclass(frozen=True)
class Call:
    """What a call is about, beside its tensors."""

    settings: KVMSettings
    plan: Plan
    handover: Handover
    returns_state: bool


@dataclass(frozen=True)
class CallTensors:
    """The tensor arguments of `KVMFunction`, in its order; slots are slots first."""

    q: Tensor  # [B, T, H, D]
    k: Tensor
    v: Tensor
    gate: Tensor | None  # [B, T, H]
    norm_weight: Tensor  # [D]
    norm_bias: Tensor
    state_temperature: Tensor | None  # [H]
    window_temperature: Tensor | None
    slot_keys: Tensor | None = None  # [m, B, H, D] before the call; None where the rank before has it
    slot_values: Tensor | None = None
    slot_magnitudes: Tensor | None = None  # [m, B, H]
    window_keys: Tensor | None = None  # [B, w, H, D], the tokens before the call that it reads or folds
    window_values: Tensor | None = None
    window_gate: Tensor | None = None  # [B, w, H]

    def all(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, one.name) for one in fields(self))

    def queries(self, call: Call) -> Queries:
        dtype = accumulation_dtype(self.q.dtype)
        return Queries(self.q, call.plan.start, dtype, self.state_temperature, self.window_temperature)

    def tokens(self, call: Call) -> CallTokens:
        start = call.plan.start
        return CallTokens(
            Tokens(self.window_keys, self.k, start),
            Tokens(self.window_values, self.v, start),
            None if self.gate is None else Tokens(self.window_gate, self.gate, start),
            KeyNorm(self.norm_weight, self.norm_bias),
            call.settings,
        )

    def boundary(self) -> SlotTensors:
        """S_K, S_V and magnitudes before the call; no slots at the start of a sequence."""
        empty = self.norm_weight.new_empty(0, self.q.shape[0], *self.q.shape[2:])
        return (
            empty if self.slot_keys is None else self.slot_keys,
            empty if self.slot_values is None else self.slot_values,
            empty[..., 0] if self.slot_magnitudes is None else self.slot_magnitudes,
        )


class KVMFunction(torch.autograd.Function):
    """Of a `Call` and the tensors of `CallTensors`: the output [B, T, H, D] and, if wanted, the slots."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> Tensor | tuple[Tensor, ...]:
        given = _with_window_before(call, CallTensors(*tensors))
        tokens = given.tokens(call)
        router, given = _advance(call, given, tokens)
        keys, values, fold_in = _memories(call, given, tokens, router)
        output, log_sum = attend(given.queries(call), tokens, call.plan, keys, values, fold_in)
        ctx.call = call
        ctx.save_for_backward(*given.all(), router.routes, output, log_sum)
        ctx.set_materialize_grads(False)
        return (output, keys.sums, values.sums, values.magnitudes) if call.returns_state else output

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: Tensor | None, *grad_state: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *tensors, routes, output, log_sum = ctx.saved_tensors
        call, given = ctx.call, CallTensors(*tensors)
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output.contiguous()
        with torch.autocast(output.device.type, enabled=False):
            queries, tokens = given.queries(call), given.tokens(call)
            gradients = CallGradients(queries, tokens, call.handover.edge)
            reads = ReadBackward(queries, grad_output, output, log_sum)
            boundary = _backward(call, given, reads, tokens, routes, gradients, grad_state)
        gate = gradients.gate
        found = CallTensors(
            gradients.q,
            gradients.k.local,
            gradients.v.local,
            None if gate is None else gate.local,
            gradients.norm_weight,
            gradients.norm_bias,
            gradients.state_temperature,
            gradients.window_temperature,
            *boundary,
            gradients.k.before,
            gradients.v.before,
            None if gate is None else gate.before,
        )
        return None, *(
            grad.to(tensor.dtype) if wanted and grad is not None and tensor is not None else None
            for wanted, grad, tensor in zip(ctx.needs_input_grad[1:], found.all(), given.all(), strict=True)
        )


def _with_window_before(call: Call, given: CallTensors) -> CallTensors:
    """Send the window that the next rank needs, and add the one that the rank before sends."""
    handover = call.handover

    def send() -> None:
        tokens = given.tokens(call)
        handover.send_window((tokens.keys, tokens.values, *((tokens.gate,) if tokens.gate else ())))

    if handover.has_next and handover.edge_is_local:
        send()
    if handover.has_previous:
        local = (given.k, given.v, *(() if given.gate is None else (given.gate,)))
        names = ("window_keys", "window_values", "window_gate")
        given = replace(given, **dict(zip(names, handover.receive_window(local), strict=False)))
    if handover.has_next and not handover.edge_is_local:
        send()
    return given


def _advance(call: Call, given: CallTensors, tokens: CallTokens) -> tuple[Router, CallTensors]:
    """Where a rank follows: route all folds and pass on the state, S_K first, which is all it waits for."""
    handover, plan = call.handover, call.plan
    dtype = given.norm_weight.dtype
    if handover.has_previous:
        given = replace(given, slot_keys=handover.receive_keys(given.q, dtype))
    router = Router(tokens, given.boundary()[0], plan)
    if handover.has_next:
        for fold in plan.folds:
            router.fold(fold, with_values=False)
        handover.send_keys(router.memory.sums)
    if handover.has_previous:
        values, magnitudes = handover.receive_values(given.q, dtype)
        given = replace(given, slot_values=values, slot_magnitudes=magnitudes)
    if handover.has_next:
        memory = ValueMemory(*given.boundary()[1:], plan.slots_stop, call.settings)
        replay(tokens, router.routes, plan, plan.folds, None, memory)
        handover.send_values(memory.sums, memory.magnitudes)
    return router, given


def _memories(
    call: Call, given: CallTensors, tokens: CallTokens, router: Router
) -> tuple[KeyMemory, ValueMemory, Callable[[tuple[Fold, ...]], None]]:
    """Memories at the start of the call, and what brings them forward: routing, or the routes at hand."""
    boundary, slots = given.boundary(), call.plan.slots_stop
    values = ValueMemory(*boundary[1:], slots, call.settings)
    if call.handover.has_next:
        keys = KeyMemory(boundary[0], slots, tokens.norm)
        return keys, values, lambda folds: replay(tokens, router.routes, call.plan, folds, keys, values)

    def route(folds: tuple[Fold, ...]) -> None:
        for fold in folds:
            values.fold(router.fold(fold, with_values=True))

    return router.memory, values, route


def _backward(
    call: Call,
    given: CallTensors,
    reads: ReadBackward,
    tokens: CallTokens,
    routes: Tensor,
    gradients: CallGradients,
    grad_state: tuple[Tensor | None, ...],
) -> SlotTensors:
    """Fill `gradients`; returns the gradient of the state before the call.

    Attention gradients come first, on all ranks at once; only sums wait for the rank after.
    """
    handover, plan = call.handover, call.plan
    window = WindowBackward(gradients, handover.edge)
    window.run(reads, tokens, plan)
    if not handover.edge_is_local:
        window.finish(handover.receive_window_gradient((gradients.k, gradients.v)))
    if handover.has_previous:
        handover.send_window_gradient((gradients.k, gradients.v))

    def later() -> SlotTensors:
        if not handover.has_next:
            return _or_zeros(grad_state, plan.slots_stop, given)
        if handover.edge_is_local:
            window.finish(handover.receive_window_gradient((gradients.k, gradients.v)))
        return handover.receive_slot_gradient(given.q, given.norm_weight.dtype)

    walk = _SlotWalk(call, tokens, gradients, later)
    boundary = walk.run(StateReads(reads, tokens, routes, plan, given.boundary()))
    shares = (gradients.k, gradients.v, *((gradients.gate,) if gradients.gate else ()))
    if handover.has_next and not handover.edge_is_local:
        handover.receive_share(shares)
    if handover.has_previous:
        handover.send_slot_gradient(boundary)
        handover.send_share(shares)
    if handover.has_next and handover.edge_is_local:
        handover.receive_share(shares)
    return boundary


class _SlotWalk:
    """From the last block to the first: what each read sends to the slots, and the share of their tokens."""

    def __init__(
        self,
        call: Call,
        tokens: CallTokens,
        gradients: CallGradients,
        later: Callable[[], SlotTensors],
    ) -> None:
        self.call = call
        self.tokens = tokens
        self.gradients = gradients
        self.later = later
        self.running: SlotGradient | None = None
        self.waiting: list[tuple[SlotTensors | None, RoutedFolds]] = []

    def run(self, reads: StateReads) -> SlotTensors:
        plan = self.call.plan
        self._take(None, reads.rewind(plan.closing))
        for block in reversed(plan.blocks):
            sent = reads.backward(block, self.gradients)
            self._take(sent, reads.rewind(block.folds))
        return self._sum_waiting().first(plan.slots_start)

    def _take(self, sent: SlotTensors | None, folds: RoutedFolds) -> None:
        self.waiting.append((sent, folds))
        waiting_bytes = sum(tensor.nbytes for one, _ in self.waiting for tensor in one or ())
        if self.running or not self.call.handover.has_next or waiting_bytes > WAITING_BYTES:
            self._sum_waiting()

    def _sum_waiting(self) -> SlotGradient:
        """Add what waits to the running gradient, later blocks first, as one rank would."""
        plan = self.call.plan
        if self.running is None:
            self.running = SlotGradient(self.later(), plan.slots_stop)
        for sent, folds in self.waiting:
            if sent is not None:
                self.running.add(sent)
            for fold, routes in folds:
                self.running.share_out(fold, routes, self.tokens, self.gradients)
        self.waiting.clear()
        return self.running


def _or_zeros(grads: tuple[Tensor | None, ...], slots: int, given: CallTensors) -> SlotTensors:
    """Gradients of the returned slots [m, B, H, D], [m, B, H, D], [m, B, H], where there are any."""
    zeros = given.norm_weight.new_zeros(slots, given.q.shape[0], *given.q.shape[2:])
    keys, values, magnitudes = grads or (None, None, None)
    return (
        zeros if keys is None else keys,
        zeros if values is None else values,
        zeros[..., 0] if magnitudes is None else magnitudes,
    )
