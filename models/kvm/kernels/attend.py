"""The parallel pass: states are rebuilt from the routes a bounded piece at a time, and read at once."""

import torch
from torch import Tensor

from models.kvm.kernels.advance import Routes
from models.kvm.kernels.jit.read import read_kernel
from models.kvm.kernels.jit.walk import walk_kernel
from models.kvm.kernels.launch import launch
from models.kvm.kernels.operands import Cut, Operands, SlotTensors, grown
from models.kvm.kernels.tables import Segment

STATES_BYTES = 2**29  # of states in memory at once


class Snapshots:
    """The states of one segment and group of rows, [snapshots, rows, slots, .], after the walk to its end."""

    def __init__(
        self,
        call: Operands,
        routes: Routes,
        running: SlotTensors,
        segment: Segment,
        group: tuple[int, int],
        keep: bool,
    ) -> None:
        """running: the group's slots [rows, S, .], brought to the end. keep: keep the sums too."""
        self.segment, self.first_row, self.rows = segment, *group
        self.kbar = call.prepare_keys(segment.folds, *group)
        shape = (segment.snapshots, self.rows, segment.slots, call.width)
        self.keys, self.values = (call.q.new_empty(shape) for _ in range(2))
        kept = shape if keep else (0, 0, 0, 0)
        self.kept_keys, self.kept_values = (running[0].new_empty(kept) for _ in range(2))
        self.kept_magnitudes = running[0].new_empty(kept[:3])
        tile = call.tile("fold")
        launch(
            walk_kernel,
            (call.tiles(running[0].shape[1], tile.block_m), self.rows),
            (
                *running, self.kbar, call.v, call.gate_or_any, routes.order, routes.codes, call.tables.folds,
                call.tables.reads, call.norm_weight, call.norm_bias, self.keys, self.values, self.kept_keys,
                self.kept_values, self.kept_magnitudes, segment.first, segment.snapshots, segment.slots,
                running[0].shape[1], call.folds, self.first_row, call.heads, call.tokens,
            ),
            tile,
            call.target,
            BLOCK=tile.block_m,
            RADIUS=call.settings.value_radius,
            SNAPSHOT=segment.slots > 0,
            KEEP=keep and segment.slots > 0,
            **call.following,
        )  # fmt: skip


def attend(call: Operands, routes: Routes, boundary: SlotTensors) -> tuple[Tensor, Tensor, SlotTensors]:
    """Output, as the queries, its log-sum-exp [query rows, T], and the slots [rows, S, .] after all folds.

    boundary: [rows, m, .] before the call.
    """
    output = torch.empty_like(call.q)
    log_sum = call.norm_weight.new_empty(call.query_rows, call.queries)
    keys, values, magnitudes = (grown(tensor, call.plan.slots_stop) for tensor in boundary)
    # Per slot: what queries read, and at most one prepared key of the fold before, in float32.
    cut = Cut.fit(call, call.width * (2 * call.q.element_size() + 4), 0, STATES_BYTES)
    for row, rows in cut.groups(call):
        running = keys[row : row + rows], values[row : row + rows], magnitudes[row : row + rows]
        for segment in call.tables.segments(cut.most_slots):
            _read(call, Snapshots(call, routes, running, segment, (row, rows), False), output, log_sum)
    return output, log_sum, (keys, values, magnitudes)


def walk_to_end(call: Operands, routes: Routes, boundary: SlotTensors) -> SlotTensors:
    """The slots [rows, S, .] after the last fold."""
    keys, values, magnitudes = (grown(tensor, call.plan.slots_stop) for tensor in boundary)
    for segment in call.tables.segments(STATES_BYTES // (call.rows * call.width * 4)):
        walk(call, routes, (keys, values, magnitudes), segment, (0, call.rows))
    return keys, values, magnitudes


def walk(
    call: Operands, routes: Routes, running: SlotTensors, segment: Segment, group: tuple[int, int]
) -> None:
    """Bring a group's slots to the end of a segment, and keep nothing."""
    unread = Segment(segment.first, segment.stop, segment.blocks, 0)
    Snapshots(call, routes, running, unread, group, False)


def _read(call: Operands, states: Snapshots, output: Tensor, log_sum: Tensor) -> None:
    tile, chunk = call.tile("read"), call.settings.chunk
    blocks = call.tables.blocks[states.segment.blocks]
    launch(
        read_kernel,
        (len(blocks) * call.tiles(chunk, tile.block_m), states.rows * call.group),
        (
            call.q, call.k, call.v, states.keys, states.values, call.state_temperature,
            call.window_temperature, output, log_sum, blocks, states.segment.first, states.segment.slots,
            states.first_row, call.heads, call.queries, call.tokens, call.scale,
        ),
        tile,
        call.target,
        TEMPERED=call.tempered,
        GROUP=call.group,
        C=chunk,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        PRECISION=call.precision,
        **call.widths,
    )  # fmt: skip
