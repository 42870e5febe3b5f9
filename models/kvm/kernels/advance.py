"""The serial pass: where every overflowing token goes. A few launches a fold, none waits for the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.kvm.kernels.jit.route import append_kernel, route_kernel, sort_kernel
from models.kvm.kernels.jit.walk import fold_keys_kernel
from models.kvm.kernels.launch import launch
from models.kvm.kernels.operands import Operands, grown
from models.kvm.kernels.tuning import ranked_at_once, route_share
from models.kvm.layout import Fold

PREPARED_BYTES = 2**28  # of keys prepared at once


@dataclass(frozen=True)
class Routes:
    """Tokens of each fold sorted by slot, [rows, F, C]."""

    order: Tensor  # int32 token in the fold
    codes: Tensor  # int32 2 * slot + (1 where the token opens it)


def advance(call: Operands, boundary: Tensor) -> tuple[Routes, Tensor]:
    """Routes, and S_K [rows, S, D] after the last fold, from S_K [rows, m, D] before the call."""
    chunk, plan = call.settings.chunk, call.plan
    shape = (call.rows, call.folds, chunk)
    codes = boundary.new_empty(shape, dtype=torch.int32)
    sums = grown(boundary, plan.slots_stop)
    normed = call.norm_slots(sums, plan.slots_start)
    scratch = _Scratch.of(call)
    length = max(1, PREPARED_BYTES // (call.rows * chunk * call.width * 4))
    for first in range(0, len(plan.folds), length):
        group = range(first, min(first + length, len(plan.folds)))
        kbar = call.prepare_keys(group, 0, call.rows)
        for index in group:
            step = _Step(call, plan.folds[index], index, kbar[:, index - first], sums, normed, scratch)
            step.run(codes)
    return _sorted(call, codes), sums


def _sorted(call: Operands, codes: Tensor) -> Routes:
    """Tokens of all folds at once: nothing serial waits for their order."""
    routes, tile = Routes(torch.empty_like(codes), torch.empty_like(codes)), call.tile("rows")
    launch(
        sort_kernel,
        (len(call.plan.folds), call.rows),
        (codes, routes.order, routes.codes, call.tables.folds, call.folds),
        tile,
        call.target,
        C=codes.shape[2],
        BLOCK_C=call.padded_chunk,
        BLOCK=tile.block_n,
    )
    return routes


@dataclass(frozen=True)
class _Scratch:
    """What the launches of one fold hand each other, [shares, rows, C]; the next fold writes it anew."""

    best: Tensor  # similarity to the most similar slot that is no sink
    found: Tensor  # int32 its code
    scores: Tensor  # similarity to any slot

    @classmethod
    def of(cls, call: Operands) -> "_Scratch":
        shares = max((_shares(call, fold) for fold in call.plan.folds), default=1)
        shape = (shares, call.rows, call.settings.chunk)
        best, scores = (call.norm_weight.new_empty(shape) for _ in range(2))
        return cls(best, best.new_empty(shape, dtype=torch.int32), scores)


def _share(call: Operands, fold: Fold) -> int:
    """Slots that a program of the routing kernel looks at."""
    tile = call.tile("route")
    return route_share(tile, call.target, call.settings.chunk, call.rows, fold.slots_before)


def _shares(call: Operands, fold: Fold) -> int:
    return 1 if fold.is_first_state else call.tiles(fold.slots_before, _share(call, fold))


@dataclass(frozen=True)
class _Step:
    """One fold: route its tokens, let some of them open slots, add all to the sums."""

    call: Operands
    fold: Fold
    index: int
    kbar: Tensor  # [rows, C, D]
    sums: Tensor  # [rows, S, D]
    normed: Tensor
    scratch: _Scratch

    def run(self, codes: Tensor) -> None:
        shares = _shares(self.call, self.fold)
        if self.fold.is_first_state:
            self._open_all()
        else:
            self._route(shares)
        if self.fold.appended and not self.fold.is_first_state:
            self._append(shares)
            shares = 1
        self._fold(codes, shares)

    def _open_all(self) -> None:
        found = self.scratch.found
        place = torch.arange(found.shape[2], dtype=torch.int32, device=found.device)
        found[0] = 2 * (place + self.fold.slots_before) + 1

    def _route(self, shares: int) -> None:
        call, tile, scratch = self.call, self.call.tile("route"), self.scratch
        launch(
            route_kernel,
            (call.tiles(call.settings.chunk, tile.block_m), call.rows, shares),
            (
                self.kbar, self.normed, scratch.best, scratch.found, scratch.scores, self.kbar.stride(0),
                _share(call, self.fold), self.fold.slots_before, self.sums.shape[1], call.settings.sinks,
            ),
            tile,
            call.target,
            APPENDS=self.fold.appended > 0,
            C=call.settings.chunk,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            PRECISION=call.target.float32_dot,
            **call.widths,
        )  # fmt: skip

    def _append(self, shares: int) -> None:
        call, tile, scratch = self.call, self.call.tile("route"), self.scratch
        launch(
            append_kernel,
            (call.tiles(call.settings.chunk, tile.block_m), call.rows),
            (
                self.kbar, call.gate_or_any, call.tables.folds, call.norm_weight, call.norm_bias,
                scratch.best, scratch.found, scratch.scores, self.kbar.stride(0), self.index, shares,
                self.fold.slots_before, self.fold.appended, call.heads, call.tokens,
            ),
            tile,
            call.target,
            GATED=call.gate is not None and call.settings.gate_appends,
            C=call.settings.chunk,
            BLOCK_C=call.padded_chunk,
            RANKED=ranked_at_once(call.target, call.padded_chunk),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            PRECISION=call.target.float32_dot,
            **call.widths,
        )  # fmt: skip

    def _fold(self, codes: Tensor, shares: int) -> None:
        call, tile, slots = self.call, self.call.tile("fold"), self.fold.slots_after
        launch(
            fold_keys_kernel,
            (call.tiles(slots, tile.block_m), call.rows),
            (
                self.sums, self.normed, self.kbar, call.gate_or_any, self.scratch.best, self.scratch.found,
                codes, call.tables.folds, call.norm_weight, call.norm_bias, self.kbar.stride(0), self.index,
                call.folds, shares, slots, self.sums.shape[1], call.heads, call.tokens,
            ),
            tile,
            call.target,
            BLOCK_C=call.padded_chunk,
            BLOCK=tile.block_m,
            **call.folding,
        )  # fmt: skip
