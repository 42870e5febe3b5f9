"""The serial pass: where every overflowing token goes. A few launches a fold, none waits for the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.kvm.kernels.jit.route import append_kernel, route_kernel, route_new_kernel, sort_kernel
from models.kvm.kernels.jit.walk import fold_keys_kernel
from models.kvm.kernels.launch import launch
from models.kvm.kernels.operands import Operands, grown
from models.kvm.kernels.tuning import SMALLEST_DOT
from models.kvm.layout import Fold

PREPARED_BYTES = 2**28  # of keys prepared at once
NO_CODE = 0x7FFFFFF0  # of tokens that a short fold lacks: sorts last


@dataclass(frozen=True)
class Routes:
    """Tokens of each fold sorted by slot, [rows, F, C]."""

    order: Tensor  # int32 token in the fold
    codes: Tensor  # int32 2 * slot + (1 where the token opens it)


def advance(call: Operands, boundary: Tensor) -> tuple[Routes, Tensor]:
    """Routes, and S_K [rows, S, D] after the last fold, from S_K [rows, m, D] before the call."""
    chunk, plan = call.settings.chunk, call.plan
    shape = (call.rows, call.folds, chunk)
    codes, sorted_codes, order = (boundary.new_empty(shape, dtype=torch.int32) for _ in range(3))
    routes = Routes(order, sorted_codes)
    sums = grown(boundary, plan.slots_stop)
    normed = call.norm_slots(sums, plan.slots_start)
    scratch = _Scratch.of(call)
    length = max(1, PREPARED_BYTES // (call.rows * chunk * call.width * 4))
    for first in range(0, len(plan.folds), length):
        group = range(first, min(first + length, len(plan.folds)))
        kbar = call.prepare_keys(group, 0, call.rows)
        for index in group:
            step = _Step(call, plan.folds[index], index, kbar[:, index - first], sums, normed, scratch)
            step.run(codes, routes)
    return routes, sums


@dataclass(frozen=True)
class _Scratch:
    """What the launches of one fold hand each other, [rows, C]; the next fold writes it anew."""

    best: Tensor  # similarity to the most similar slot that is no sink
    scores: Tensor  # to any slot
    opened: Tensor  # int32 the slot that a token opens, or -1
    openers: Tensor  # int32 the token that opens a new slot

    @classmethod
    def of(cls, call: Operands) -> "_Scratch":
        shape = (call.rows, call.settings.chunk)
        best, scores = (call.norm_weight.new_empty(shape) for _ in range(2))
        opened, openers = (best.new_empty(shape, dtype=torch.int32) for _ in range(2))
        return cls(best, scores, opened, openers)


@dataclass(frozen=True)
class _Step:
    """One fold: route its tokens, sort them by slot, add them to the sums."""

    call: Operands
    fold: Fold
    index: int
    kbar: Tensor  # [rows, C, D]
    sums: Tensor  # [rows, S, D]
    normed: Tensor
    scratch: _Scratch

    def run(self, codes: Tensor, routes: Routes) -> None:
        if self.fold.is_first_state:
            self._open_all(codes, routes)
        else:
            if self.fold.appended:
                self._route_and_append(codes)
            else:
                self._route(codes, appends=False)
            self._sort(codes, routes)
        self._fold(routes)

    def _open_all(self, codes: Tensor, routes: Routes) -> None:
        count, chunk = self.fold.stop - self.fold.start, codes.shape[2]
        place = torch.arange(chunk, dtype=torch.int32, device=codes.device)
        routes.order[:, self.index] = place
        opened = 2 * (place + self.fold.slots_before) + 1
        routes.codes[:, self.index] = opened.masked_fill(place >= count, NO_CODE)

    def _route(self, codes: Tensor, appends: bool) -> None:
        call, tile = self.call, self.call.tile("route")
        launch(
            route_kernel,
            (call.tiles(codes.shape[2], tile.block_m), call.rows),
            (
                self.kbar, self.normed, codes, self.scratch.best, self.scratch.scores,
                self.kbar.stride(0), self.index, call.folds,
                self.fold.slots_before, self.sums.shape[1], call.settings.sinks,
            ),
            tile,
            call.target,
            APPENDS=appends,
            C=codes.shape[2],
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            PRECISION=call.target.float32_dot,
            **call.widths,
        )  # fmt: skip

    def _route_and_append(self, codes: Tensor) -> None:
        call, chunk = self.call, codes.shape[2]
        scratch = self.scratch
        self._route(codes, appends=True)
        tile = call.tile("rows")
        launch(
            append_kernel,
            (call.rows,),
            (scratch.scores, scratch.opened, scratch.openers, self.fold.slots_before, self.fold.appended),
            tile,
            call.target,
            C=chunk,
            BLOCK_C=_power_of_two(chunk),
            BLOCK=tile.block_n,
        )
        tile = call.tile("route")
        launch(
            route_new_kernel,
            (call.tiles(chunk, tile.block_m), call.rows),
            (
                self.kbar, call.gate_or_any, call.tables.folds, call.norm_weight, call.norm_bias, codes,
                scratch.best, scratch.opened, scratch.openers, self.kbar.stride(0), self.index, call.folds,
                self.fold.slots_before, self.fold.appended, call.heads, call.tokens,
            ),
            tile,
            call.target,
            GATED=call.gate is not None and call.settings.gate_appends,
            C=chunk,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            PRECISION=call.target.float32_dot,
            **call.widths,
        )  # fmt: skip

    def _sort(self, codes: Tensor, routes: Routes) -> None:
        tile = self.call.tile("rows")
        launch(
            sort_kernel,
            (self.call.rows,),
            (codes, routes.order, routes.codes, self.call.tables.folds, self.index, self.call.folds),
            tile,
            self.call.target,
            C=codes.shape[2],
            BLOCK_C=_power_of_two(codes.shape[2]),
            BLOCK=tile.block_n,
        )

    def _fold(self, routes: Routes) -> None:
        call, tile, slots = self.call, self.call.tile("fold"), self.fold.slots_after
        launch(
            fold_keys_kernel,
            (call.tiles(slots, tile.block_m), call.rows),
            (
                self.sums, self.normed, self.kbar, call.gate_or_any, routes.order, routes.codes,
                call.tables.folds, call.norm_weight, call.norm_bias, self.kbar.stride(0), self.index,
                call.folds, slots, self.sums.shape[1], call.heads, call.tokens,
            ),
            tile,
            call.target,
            BLOCK=tile.block_m,
            **call.folding,
        )  # fmt: skip


def _power_of_two(count: int) -> int:
    return max(SMALLEST_DOT, 1 << (count - 1).bit_length())
