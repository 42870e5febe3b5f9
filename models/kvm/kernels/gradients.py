"""The backward of one call: reads of all blocks at once, then sums over later blocks, last block first."""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from models.kvm.kernels import tuning
from models.kvm.kernels.advance import Routes
from models.kvm.kernels.attend import Snapshots, walk
from models.kvm.kernels.jit.keys import prepare_keys_backward_kernel
from models.kvm.kernels.jit.read_backward import (
    delta_kernel,
    read_backward_queries_kernel,
    read_backward_slots_kernel,
    read_backward_window_kernel,
)
from models.kvm.kernels.jit.walk import share_out_kernel
from models.kvm.kernels.launch import launch
from models.kvm.kernels.operands import Cut, Operands, SlotTensors, grown

STATES_BYTES = 2**30  # of states and their gradients in memory at once


@dataclass(frozen=True)
class Saved:
    """What the forward leaves for the backward."""

    routes: Routes
    boundary: SlotTensors  # [rows, m, .] before the call
    output: Tensor  # [B, T, group * H, D]
    log_sum: Tensor  # [query rows, T]


class Gradients:
    """Filled by `window` and `states`; float32 but for dq. Key places as in `Operands`."""

    def __init__(self, call: Operands, saved: Saved, grad_output: Tensor) -> None:
        """grad_output: as q, contiguous, in its dtype."""
        self.call, self.saved, self.grad_output = call, saved, grad_output
        float32 = call.norm_weight
        self.q = torch.empty_like(call.q)
        self.k, self.v = (float32.new_zeros(call.k.shape) for _ in range(2))
        self.gate = None if call.gate is None else float32.new_zeros(call.gate.shape)
        self.norm = float32.new_zeros(2, call.width)
        self.row_temperatures = float32.new_zeros(call.query_rows, 2)  # of the state's and the window's
        self._delta = float32.new_empty(call.query_rows, call.queries)
        tile = call.tile("rows")
        launch(
            delta_kernel,
            (call.tiles(call.queries, tile.block_m), call.query_rows),
            (saved.output, grad_output, self._delta, call.heads * call.group, call.queries),
            tile,
            call.target,
            BLOCK=tile.block_m,
            **call.widths,
        )

    @property
    def temperatures(self) -> Tensor:
        """[H, 2] of the state's and the window's."""
        by_batch = self.row_temperatures.clone().view(-1, self.call.heads * self.call.group, 2)
        return _summed(_summed(by_batch).view(self.call.heads, -1, 2).transpose(0, 1))

    def window(self, begin: int, end: int) -> None:
        """Add to dk, dv of the keys [begin, end) what this call's queries send through the window."""
        call, tile = self.call, self.call.tile("read_backward_window")
        if begin >= end:
            return
        chunk, base = call.settings.chunk, call.plan.start - (call.tokens - call.queries)
        first_chunk = (base + begin) // chunk
        chunks = (base + end - 1) // chunk + 1 - first_chunk
        launch(
            read_backward_window_kernel,
            (chunks * call.tiles(chunk, tile.block_n), call.rows),
            (
                call.q, call.k, call.v, call.window_temperature, self.grad_output, self.saved.log_sum,
                self._delta, self.k, self.v, call.plan.start, first_chunk, begin, end, call.heads,
                call.queries, call.tokens, call.scale,
            ),
            tile,
            call.target,
            TEMPERED=call.tempered,
            GROUP=call.group,
            C=chunk,
            WINDOW_CHUNKS=call.settings.window_chunks,
            AGAIN=tuning.multiplies_without_units(call.target, call.shape),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            PRECISION=call.precision,
            **call.widths,
        )  # fmt: skip

    def states(self, groups: int = 1) -> Generator[None, SlotTensors, SlotTensors]:
        """dq, what reads send to the slots, and the tokens' shares; returns the gradient of the state before.

        Yields once, as late as possible, to be sent the gradient [rows, S, .] of the state after the call.
        groups: how many such passes lie in memory at once.
        """
        call, boundary = self.call, self.saved.boundary
        # Per slot: what queries read; in float32 the sums, a prepared key, and the gradients of both.
        bytes_per_slot = call.width * (2 * call.q.element_size() + 6 * 4)
        cut = Cut.fit(call, bytes_per_slot, call.width * 8, STATES_BYTES // groups)
        running: SlotTensors | None = None
        for row, rows in cut.groups(call):
            group = (row, rows)
            walked = _SegmentStarts(call, self.saved, group, cut)
            while walked.left:
                states = walked.pop()
                self._queries(states)
                sent = self._slots(states)
                if running is None:
                    keys, values, magnitudes = (tensor.clone() for tensor in (yield))
                    running = keys, values, magnitudes
                of_group = tuple(tensor[row : row + rows] for tensor in running)
                self._share_out(states, sent, (of_group[0], of_group[1], of_group[2]))
        assert running is not None, "a call has at least one row and one snapshot"
        slots = boundary[0].shape[1]
        return running[0][:, :slots], running[1][:, :slots], running[2][:, :slots]

    def _queries(self, states: Snapshots) -> None:
        call, tile = self.call, self.call.tile("read_backward_queries")
        blocks = call.tables.blocks[states.segment.blocks]
        programs = len(blocks) * call.tiles(call.settings.chunk, tile.block_m)
        rows = states.rows * call.group
        shares = self.norm.new_empty(programs, rows, 2)
        launch(
            read_backward_queries_kernel,
            (programs, rows),
            (
                call.q, call.k, call.v, states.keys, states.values, call.state_temperature,
                call.window_temperature, self.grad_output, self.saved.log_sum, self._delta, self.q, shares,
                blocks, states.segment.first, states.segment.slots, states.first_row, call.heads,
                call.queries, call.tokens, call.scale,
            ),
            tile,
            call.target,
            TEMPERED=call.tempered,
            GROUP=call.group,
            C=call.settings.chunk,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            PRECISION=call.precision,
            **call.widths,
        )  # fmt: skip
        first = states.first_row * call.group
        self.row_temperatures[first : first + rows] += _summed(shares)

    def _slots(self, states: Snapshots) -> SlotTensors:
        """What each snapshot's reader sends to it, [snapshots, rows, slots, .]."""
        call, tile = self.call, self.call.tile("read_backward_slots")
        sent = (
            torch.empty_like(states.kept_keys),
            torch.empty_like(states.kept_values),
            torch.empty_like(states.kept_magnitudes),
        )
        if not states.segment.slots:
            return sent
        blocks = call.tables.blocks[states.segment.blocks]
        grid = (call.tiles(states.segment.slots, tile.block_n), states.rows, len(blocks))
        shares = self.norm.new_empty(grid[0] * grid[1] * grid[2], 2, call.width)
        launch(
            read_backward_slots_kernel,
            grid,
            (
                call.q, states.keys, states.values, states.kept_keys, states.kept_values,
                states.kept_magnitudes, call.norm_weight, call.state_temperature, self.grad_output,
                self.saved.log_sum, self._delta, *sent, shares, blocks, states.segment.first,
                states.segment.slots, states.first_row, call.heads, call.queries, call.scale,
            ),
            tile,
            call.target,
            TEMPERED=call.tempered,
            RADIUS=call.settings.value_radius,
            GROUP=call.group,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            PRECISION=call.precision,
            **call.widths,
        )  # fmt: skip
        self.norm += shares.sum(dim=0)
        return sent

    def _share_out(self, states: Snapshots, sent: SlotTensors, running: SlotTensors) -> None:
        call, tile, segment = self.call, self.call.tile("fold"), states.segment
        grad_kbar = torch.empty_like(states.kbar)
        launch(
            share_out_kernel,
            (call.tiles(running[0].shape[1], tile.block_m), states.rows),
            (
                *running, *sent, call.tables.reads, call.tables.folds, states.kbar, call.v, call.gate_or_any,
                self.saved.routes.order, self.saved.routes.codes, grad_kbar, self.v,
                self.v if self.gate is None else self.gate, segment.first, segment.snapshots, segment.slots,
                running[0].shape[1], call.folds, states.first_row, call.heads, call.tokens,
            ),
            tile,
            call.target,
            BLOCK=tile.block_m,
            RADIUS=call.settings.value_radius,
            **call.following,
        )  # fmt: skip
        self._keys(grad_kbar, segment.folds, states.first_row)

    def _keys(self, grad_kbar: Tensor, folds: range, row0: int) -> None:
        """From kbar to k, and to the norm."""
        call, tile, chunk = self.call, self.call.tile("prepare_keys"), self.call.settings.chunk
        grid = (len(folds) * call.tiles(chunk, tile.block_m), len(grad_kbar))
        shares = self.norm.new_empty(grid[0] * grid[1], 2, call.width)
        launch(
            prepare_keys_backward_kernel,
            grid,
            (
                call.k, grad_kbar, call.norm_weight, call.tables.folds, self.k, shares, folds.start,
                len(folds), row0, call.heads, call.tokens,
            ),
            tile,
            call.target,
            C=chunk,
            ROTARY=call.settings.rotary_dims,
            BLOCK=tile.block_m,
            **call.widths,
        )  # fmt: skip
        self.norm += shares.sum(dim=0)


def _summed(parts: Tensor) -> Tensor:
    """Over the first dim, by halves, written over `parts`.

    The order in which `torch.sum` adds depends on how many columns lie beside each other, and so the bits of
    a head's sum on how many heads are in the call.
    """
    while (count := len(parts)) > 1:
        kept = (count + 1) // 2
        parts[: count - kept] += parts[kept:]
        parts = parts[:kept]
    return parts[0]


class _SegmentStarts:
    """The segments of a group, handed out from the last: each is walked again from the state at its start.

    Earlier states are rebuilt, not found by subtracting, so they have the bits of the forward.
    """

    def __init__(self, call: Operands, saved: Saved, group: tuple[int, int], cut: Cut) -> None:
        self.call, self.saved, self.group = call, saved, group
        row, rows = group
        keys, values, magnitudes = (
            grown(tensor[row : row + rows], call.plan.slots_stop) for tensor in saved.boundary
        )
        self.segments = call.tables.segments(cut.most_slots)
        self.left: list[SlotTensors] = [(keys, values, magnitudes)]
        for segment in self.segments[:-1]:
            keys, values, magnitudes = (tensor.clone() for tensor in self.left[-1])
            walk(call, saved.routes, (keys, values, magnitudes), segment, group)
            self.left.append((keys, values, magnitudes))

    def pop(self) -> Snapshots:
        segment = self.segments[len(self.left) - 1]
        return Snapshots(self.call, self.saved.routes, self.left.pop(), segment, self.group, True)
