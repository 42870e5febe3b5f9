"""How the states of a call are cut to pieces that a GPU's grid can hold."""

from itertools import pairwise

import torch

from models.kvm import FixedBudget
from models.kvm.kernels.tables import MOST_SNAPSHOTS, tables_of
from models.kvm.kernels.tuning import MOST_ROWS
from models.kvm.layout import KVMSettings, plan_call


def test_no_segment_has_more_blocks_than_an_axis_of_a_grid_holds() -> None:
    settings = KVMSettings(FixedBudget(slots=1), chunk=1, window_chunks=2, sinks=0)
    tables = tables_of(plan_call(settings, 0, 70_000), 0, torch.device("cpu"))
    segments = tables.segments(10**9)
    blocks = [one.blocks for one in segments]
    assert len(segments) == 3
    assert max(one.snapshots for one in segments) == MOST_SNAPSHOTS
    assert max(one.stop - one.start for one in blocks) <= MOST_ROWS
    assert blocks[0].start == 0
    assert blocks[-1].stop == 70_000
    assert all(one.stop == other.start for one, other in pairwise(blocks))
