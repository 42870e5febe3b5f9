"""The passes of `backend="triton"` over one call. Kernels have a row per batch entry and head.

A head is one of keys, values and slots; what belongs to queries has a row for each of theirs.
"""

from collections.abc import Generator

import torch
from torch import Tensor

from models.kvm.call import Attended, Call, CallTensors, SlotChain
from models.kvm.call import Routes as AnyRoutes
from models.kvm.kernels.advance import Routes, advance
from models.kvm.kernels.attend import attend, walk_to_end
from models.kvm.kernels.gradients import Gradients, Saved
from models.kvm.kernels.operands import Operands, SlotTensors, operands
from models.kvm.tokens import Tokens


class TritonPasses:
    """`Passes` in Triton. Routes are those of `kernels.advance`."""

    def __init__(self, call: Call, given: CallTensors) -> None:
        self.call = call
        self.given = given
        self.work = _operands(call, given)

    def route(self, heads: slice, keys: Tensor) -> tuple[AnyRoutes, Tensor]:
        routes, sums = advance(self._work_of(heads), _row(keys))
        return (routes.order, routes.codes), self.slots_first(sums)

    def routes_shapes(self, heads: int) -> tuple[tuple[int, ...], ...]:
        shape = (len(self.given.q) * heads, self.work.folds, self.call.settings.chunk)
        return shape, shape

    def join_routes(self, groups: list[AnyRoutes]) -> AnyRoutes:
        if len(groups) == 1:
            return groups[0]
        batch = self.given.q.shape[0]
        return tuple(
            torch.cat([rows.unflatten(0, (batch, -1)) for rows in one], dim=1).flatten(0, 1)
            for one in zip(*groups, strict=True)
        )

    def sum_values(
        self, heads: slice, routes: AnyRoutes, values: Tensor, magnitudes: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = _row(values), _row(magnitudes)
        keys = rows[0].new_zeros(rows[0].shape)  # walked along, and not looked at
        _, sums, summed = walk_to_end(self._work_of(heads), Routes(*routes), (keys, *rows))
        return self.slots_first(sums), self.slots_first(summed)

    def attend(self, routes: AnyRoutes | None, boundary: SlotTensors) -> Attended:
        rows = self.rows(boundary)
        found = advance(self.work, rows[0])[0] if routes is None else Routes(*routes)
        output, log_sum, slots = attend(self.work, found, rows)
        keys, values, magnitudes = (self.slots_first(one, copy=False) for one in slots)
        log_sum = log_sum.unflatten(0, (self.given.q.shape[0], -1))
        return Attended(output, log_sum, (found.order, found.codes), (keys, values, magnitudes))

    def gradients(self, attended: Attended, grad_output: Tensor, edge: int) -> "TritonGradients":
        return TritonGradients(self, attended, grad_output, edge)

    def rows(self, slots: SlotTensors) -> SlotTensors:
        """[m, B, H, .] as kernels want it, [rows, m, .]."""
        return _row(slots[0]), _row(slots[1]), _row(slots[2])

    def of_heads(self, heads: slice) -> "TritonPasses":
        given = self.given.of_heads(heads)
        return self if given is self.given else TritonPasses(self.call, given)

    def _work_of(self, heads: slice) -> Operands:
        return self.of_heads(heads).work

    def slots_first(self, rows: Tensor, copy: bool = True) -> Tensor:
        slots = rows.unflatten(0, (self.given.q.shape[0], -1)).movedim(2, 0)
        return slots.contiguous() if copy else slots


class TritonGradients:
    """`Gradients` in Triton."""

    def __init__(self, passes: TritonPasses, attended: Attended, grad_output: Tensor, edge: int) -> None:
        """grad_output: contiguous."""
        self.passes = passes
        self.attended = attended
        self.grad_output = grad_output.to(attended.output.dtype)
        self.work = passes.work
        self.found = self.of_heads(slice(0, self.work.heads))
        self._before = self.work.tokens - self.work.queries
        # The place among the keys from which on they are needed by the next rank too.
        self._edge = edge - self.work.plan.start + self._before

    @property
    def queries(self) -> Tensor:
        return self.found.q

    @property
    def tokens(self) -> tuple[Tokens, ...]:
        before, start = self._before, self.work.plan.start
        return tuple(Tokens(one[:, :before], one[:, before:], start) for one in _per_token(self.found))

    def window(self) -> None:
        self.found.window(0, self._edge)

    def window_at_edge(self, later: tuple[Tensor, ...]) -> None:
        for gradient, sums in zip((self.found.k, self.found.v), later, strict=True):
            gradient[:, self._edge :] = sums
        self.found.window(self._edge, self.work.tokens)

    def states(self, chain: SlotChain) -> SlotTensors:
        """Every group of heads reads before the first waits, as far as memory allows."""
        groups = [_HeadGroup(self, heads, len(chain.groups)) for heads in chain.groups]
        chain.queries_done()
        boundaries = []
        for group in groups:
            boundary = group.finish(self.passes.rows(chain.receive(group.heads)))
            keys, values, magnitudes = (self.passes.slots_first(one) for one in boundary)
            chain.send(group.heads, (keys, values, magnitudes))
            boundaries.append((keys, values, magnitudes))
        if len(boundaries) == 1:
            return boundaries[0]
        keys, values, magnitudes = (torch.cat(one, dim=2) for one in zip(*boundaries, strict=True))
        return keys, values, magnitudes

    def result(self, boundary: SlotTensors) -> CallTensors:
        found = self.found
        k, v, *gate = self.tokens
        return CallTensors(
            found.q,
            k.local,
            v.local,
            gate[0].local if gate else None,
            found.norm[0],
            found.norm[1],
            found.temperatures[:, 0],
            found.temperatures[:, 1],
            *boundary,
            k.before,
            v.before,
            gate[0].before if gate else None,
        )

    def of_heads(self, heads: slice) -> Gradients:
        """Gradients of a group of heads, none summed yet."""
        attended, batch = self.attended, self.work.q.shape[0]
        order, codes = (
            one.unflatten(0, (batch, -1))[:, heads].flatten(0, 1).contiguous() for one in attended.routes
        )
        keys, values, magnitudes = (one[:, :, heads] for one in attended.slots)
        queries = self.passes.given.query_heads(heads)
        log_sum = attended.log_sum[:, queries].flatten(0, 1).contiguous()
        saved = Saved(
            Routes(order, codes),
            self.passes.rows((keys, values, magnitudes)),
            attended.output[:, :, queries].contiguous(),
            log_sum,
        )
        grad_output = self.grad_output[:, :, queries].contiguous()
        return Gradients(self.passes.of_heads(heads).work, saved, grad_output)


class _HeadGroup:
    """What the state sends back to a group of heads. Their reads are done when it is made."""

    def __init__(self, whole: TritonGradients, heads: slice, groups: int) -> None:
        self.heads = heads
        self._queries = whole.passes.given.query_heads(heads)
        self._whole = whole.found
        self._found = whole.found if groups == 1 else whole.of_heads(heads)
        self._steps = self._found.states(groups)
        next(self._steps)
        if self._found is not self._whole:
            self._whole.q[:, :, self._queries] = self._found.q

    def finish(self, later: SlotTensors) -> SlotTensors:
        """Given the gradient [rows, S, .] of the state after the call, that of the state before it."""
        whole, found, heads = self._whole, self._found, self.heads
        if found is not whole:
            # Shares are added to what the window sent, one after the other, as in a pass over all heads.
            for part, all_heads in zip(_per_token(found), _per_token(whole), strict=True):
                part.copy_(all_heads[:, :, heads])
        boundary = _last_step(self._steps, later)
        if found is not whole:
            for part, all_heads in zip(_per_token(found), _per_token(whole), strict=True):
                all_heads[:, :, heads] = part
            whole.norm += found.norm
            batch = whole.q.shape[0]
            of_rows = whole.row_temperatures.view(batch, -1, 2)[:, self._queries]
            of_rows += found.row_temperatures.view(batch, -1, 2)
        return boundary


def _last_step(steps: Generator[None, SlotTensors, SlotTensors], sent: SlotTensors) -> SlotTensors:
    try:
        steps.send(sent)
    except StopIteration as stopped:
        result: SlotTensors = stopped.value
        return result
    raise AssertionError("the backward through states asks once")


def _per_token(found: Gradients) -> tuple[Tensor, ...]:
    """Of keys, values and, if there is one, gate: [B, t, H, ...]."""
    return (found.k, found.v, *(() if found.gate is None else (found.gate,)))


def _row(slots: Tensor) -> Tensor:
    """[m, B, H, ...] as [B * H, m, ...]."""
    return slots.movedim(0, 2).flatten(0, 1).contiguous()


def _operands(call: Call, given: CallTensors) -> Operands:
    return operands(
        given.q,
        (given.window_keys, given.k),
        (given.window_values, given.v),
        (given.window_gate, given.gate),
        (given.norm_weight, given.norm_bias),
        (given.state_temperature, given.window_temperature),
        call.settings,
        call.plan,
    )
