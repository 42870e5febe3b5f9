"""The passes of `backend="torch"` over one call."""

from collections.abc import Callable

import torch
from torch import Tensor

from models.kvm.advance import CallTokens, Router
from models.kvm.attend import Queries, attend, replay
from models.kvm.call import Attended, Call, CallTensors, Gradients, Routes, SlotChain
from models.kvm.gradients import (
    CallGradients,
    ReadBackward,
    SlotGradient,
    StateReads,
    WindowBackward,
)
from models.kvm.layout import Fold, Plan
from models.kvm.memory import KeyMemory, KeyNorm, RoutedTokens, ValueMemory
from models.kvm.rewind import SlotTensors
from models.kvm.tokens import Tokens

# Gradients that reads send to the slots wait for those of the rank after, which are summed first. Beyond
# this many bytes a rank waits instead of going on.
WAITING_BYTES = 2**30

RoutedFolds = list[tuple[Fold, RoutedTokens]]  # newest first


class TorchPasses:
    """`Passes` in PyTorch. Routes are one tensor [B, t, H] of the tokens folded in the call."""

    def __init__(self, call: Call, given: CallTensors) -> None:
        self.call = call
        self.given = given

    def route(self, heads: slice, keys: Tensor) -> tuple[Routes, Tensor]:
        plan = self.call.plan
        router = Router(_tokens(self.call, self.given.of_heads(heads)), keys.contiguous(), plan)
        for fold in plan.folds:
            router.fold(fold, with_values=False)
        return (router.routes,), router.memory.sums

    def routes_shapes(self, heads: int) -> tuple[tuple[int, ...], ...]:
        return ((len(self.given.q), self.call.plan.covered_stop - self.call.plan.covered_start, heads),)

    def join_routes(self, groups: list[Routes]) -> Routes:
        return groups[0] if len(groups) == 1 else (torch.cat([one[0] for one in groups], dim=2),)

    def sum_values(
        self, heads: slice, routes: Routes, values: Tensor, magnitudes: Tensor
    ) -> tuple[Tensor, Tensor]:
        plan, settings = self.call.plan, self.call.settings
        memory = ValueMemory(values.contiguous(), magnitudes.contiguous(), plan.slots_stop, settings)
        replay(_tokens(self.call, self.given.of_heads(heads)), routes[0], plan, plan.folds, None, memory)
        return memory.sums, memory.magnitudes

    def attend(self, routes: Routes | None, boundary: SlotTensors) -> Attended:
        plan, settings = self.call.plan, self.call.settings
        tokens, (sums, *before) = _tokens(self.call, self.given), _contiguous(boundary)
        values = ValueMemory(before[0], before[1], plan.slots_stop, settings)
        if routes is None:
            router = Router(tokens, sums, plan)
            keys, found = router.memory, router.routes
        else:
            keys, found = KeyMemory(sums, plan.slots_stop, tokens.norm), routes[0]

        def fold_in(folds: tuple[Fold, ...]) -> None:
            if routes is not None:
                replay(tokens, found, plan, folds, keys, values)
                return
            for fold in folds:
                values.fold(router.fold(fold, with_values=True))

        output, log_sum = attend(_queries(self.call, self.given), tokens, plan, keys, values, fold_in)
        return Attended(output, log_sum, (found,), (keys.sums, values.sums, values.magnitudes))

    def gradients(self, attended: Attended, grad_output: Tensor, edge: int) -> Gradients:
        return TorchGradients(self.call, self.given, attended, grad_output, edge)


class TorchGradients:
    """`Gradients` in PyTorch."""

    def __init__(
        self, call: Call, given: CallTensors, attended: Attended, grad_output: Tensor, edge: int
    ) -> None:
        self.plan = call.plan
        self.attended = attended
        self._queries, self._tokens = _queries(call, given), _tokens(call, given)
        self._reads = ReadBackward(self._queries, grad_output, attended.output, attended.log_sum)
        self._found = CallGradients(self._queries, self._tokens, edge)
        self._window = WindowBackward(self._found, edge)

    @property
    def queries(self) -> Tensor:
        return self._found.q

    @property
    def tokens(self) -> tuple[Tokens, ...]:
        found = self._found
        return (found.k, found.v, *(() if found.gate is None else (found.gate,)))

    def window(self) -> None:
        self._window.run(self._reads, self._tokens, self.plan)

    def window_at_edge(self, later: tuple[Tensor, ...]) -> None:
        self._window.finish(later)

    def states(self, chain: SlotChain) -> SlotTensors:
        plan, (routes,) = self.plan, self.attended.routes
        boundary = _contiguous(self.attended.slots)
        reads = StateReads(self._reads, self._tokens, routes, plan, boundary)
        walk = _SlotWalk(chain, self._tokens, self._found)
        walk.take(None, reads.rewind(plan.closing))
        for block in reversed(plan.blocks):
            sent = reads.backward(block, self._found)
            walk.take(sent, reads.rewind(block.folds))
        chain.queries_done()
        return walk.finish(plan)

    def result(self, boundary: SlotTensors) -> CallTensors:
        found = self._found
        return CallTensors(
            found.q,
            found.k.local,
            found.v.local,
            None if found.gate is None else found.gate.local,
            found.norm_weight,
            found.norm_bias,
            found.state_temperature,
            found.window_temperature,
            *boundary,
            found.k.before,
            found.v.before,
            None if found.gate is None else found.gate.before,
        )


class _SlotWalk:
    """From the last block to the first: what each read sends to the slots, and the share of their tokens.

    The gradient of the slots after a block's folds is summed in place of what the block sends. Slots that
    were opened later no longer count, so it is all that the block's folds and earlier ones need: a rank sums
    and hands on first, and shares out when nobody waits for it.
    """

    def __init__(self, chain: SlotChain, tokens: CallTokens, gradients: CallGradients) -> None:
        self.chain = chain
        self.tokens = tokens
        self.gradients = gradients
        self.running: SlotTensors | None = None
        self.waiting: list[tuple[SlotTensors | None, RoutedFolds]] = []

    def take(self, sent: SlotTensors | None, folds: RoutedFolds) -> None:
        """What the next earlier block sends, and the folds before it."""
        self.waiting.append((sent, folds))
        waiting_bytes = sum(tensor.nbytes for one, _ in self.waiting for tensor in one or ())
        if waiting_bytes > WAITING_BYTES or not (self.chain.waits or self.chain.hands_on):
            self._sum()
            self._share_out()

    def finish(self, plan: Plan) -> SlotTensors:
        """The gradient of the state before the call, handed on."""

        def hand_on(heads: slice, gradient: SlotTensors) -> None:
            self.chain.send(heads, _first(gradient, plan.slots_start))

        self._sum(hand_on)
        return _first(self._share_out(), plan.slots_start)

    def _sum(self, done: Callable[[slice, SlotTensors], None] | None = None) -> None:
        """Add later gradients to what waits, later blocks first, as one rank would."""
        received = []
        for heads in self.chain.groups:
            if self.running is None:
                later = _contiguous(self.chain.receive(heads))
                received.append(later)
            else:
                later = _of_heads(self.running, heads)
            for sent, _ in self.waiting:
                if sent is not None:
                    sums = _of_heads(sent, heads)
                    for one, more in zip(sums, later, strict=True):
                        one += more[: len(one)]
                    later = sums
            if done is not None:
                done(heads, later)
        if received:
            self.running = _joined(received)

    def _share_out(self) -> SlotTensors:
        """Hand tokens their shares of summed gradients; returns the earliest of these."""
        assert self.running is not None, "sums come first"
        for sent, folds in self.waiting:
            self.running = sent or self.running
            for fold, routes in folds:
                _Summed(self.running).share_out(fold, routes, self.tokens, self.gradients)
        self.waiting.clear()
        return self.running


class _Summed(SlotGradient):
    """A gradient of the slots to which everything after the fold was added."""

    def __init__(self, slots: SlotTensors) -> None:
        self.keys, self.values, self.magnitudes = slots


def _queries(call: Call, given: CallTensors) -> Queries:
    temperatures = given.state_temperature, given.window_temperature
    return Queries(given.q, call.plan.start, given.accumulation_dtype, *temperatures)


def _tokens(call: Call, given: CallTensors) -> CallTokens:
    keys, values, *gate = given.tokens(call.plan.start)
    norm = KeyNorm(given.norm_weight, given.norm_bias)
    return CallTokens(keys, values, gate[0] if gate else None, norm, call.settings)


def _contiguous(slots: SlotTensors) -> SlotTensors:
    return slots[0].contiguous(), slots[1].contiguous(), slots[2].contiguous()


def _first(slots: SlotTensors, count: int) -> SlotTensors:
    return slots[0][:count], slots[1][:count], slots[2][:count]


def _of_heads(slots: SlotTensors, heads: slice) -> SlotTensors:
    return slots[0][:, :, heads], slots[1][:, :, heads], slots[2][:, :, heads]


def _joined(groups: list[SlotTensors]) -> SlotTensors:
    """Slots of all heads from those of groups of heads."""
    if len(groups) == 1:
        return groups[0]
    keys, values, magnitudes = (torch.cat(one, dim=2) for one in zip(*groups, strict=True))
    return keys, values, magnitudes
