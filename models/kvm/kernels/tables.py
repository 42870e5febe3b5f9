"""The plan of a call as integer tables for kernels, and how its states are cut to bounded pieces."""

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from models.kvm.layout import Plan

MOST_SNAPSHOTS = 2**15  # of a segment: its blocks are an axis of a grid, which holds fewer than 2**16


@dataclass(frozen=True)
class Segment:
    """Snapshots [first, stop) that lie in memory at once, and the blocks that read them.

    Snapshot i is the state after i folds of the call.
    """

    first: int
    stop: int
    blocks: slice
    slots: int  # most that a block of it reads

    @property
    def snapshots(self) -> int:
        return self.stop - self.first

    @property
    def folds(self) -> range:
        """Folds that bring the state from the snapshot before the first to the last."""
        return range(max(self.first, 1) - 1, self.stop - 1)


@dataclass(frozen=True)
class Tables:
    """int32 on the device. Key places count from the first token before the call that it was handed."""

    folds: Tensor  # [F, 3] first key, tokens, whether it is the first state
    blocks: Tensor  # [N, 5] first query, last query + 1, first key, slots, snapshot
    reads: Tensor  # [F + 1] slots read of each snapshot, by at most one block
    snapshot_slots: tuple[int, ...]  # the same, on the host
    snapshot_of_block: tuple[int, ...]  # never falls

    def segments(self, most_slots: int) -> list[Segment]:
        """As few segments as possible with at most `most_slots` slots in all their snapshots."""
        segments, first = [], 0
        while first < len(self.snapshot_slots):
            stop, slots = first + 1, self.snapshot_slots[first]
            while stop < len(self.snapshot_slots):
                wider = max(slots, self.snapshot_slots[stop])
                if wider * (stop + 1 - first) > most_slots or stop - first == MOST_SNAPSHOTS:
                    break
                stop, slots = stop + 1, wider
            readers = (bisect_left(self.snapshot_of_block, edge) for edge in (first, stop))
            blocks = slice(*readers)
            segments.append(Segment(first, stop, blocks, slots))
            first = stop
        return segments


@lru_cache(maxsize=64)
def tables_of(plan: Plan, keys_before: int, device: torch.device) -> Tables:
    base = plan.start - keys_before
    folds = [(one.start - base, one.stop - one.start, int(one.is_first_state)) for one in plan.folds]
    reads = [0] * (len(folds) + 1)
    blocks, snapshots, snapshot = [], [], 0
    for block in plan.blocks:
        snapshot += len(block.folds)
        if block.slots:
            assert not reads[snapshot], "a state is read by one block of a call"
            reads[snapshot] = block.slots
        snapshots.append(snapshot)
        blocks.append(
            (
                block.start - plan.start,
                block.stop - plan.start,
                block.window_start - base,
                block.slots,
                snapshot,
            )
        )
    return Tables(
        torch.tensor(folds or [(0, 0, 0)], dtype=torch.int32).to(device),
        torch.tensor(blocks, dtype=torch.int32).to(device),
        torch.tensor(reads, dtype=torch.int32).to(device),
        tuple(reads),
        tuple(snapshots),
    )
