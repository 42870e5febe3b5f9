"""The floor of every kernel, against numbers worked out by hand."""

import pytest

from models.budget import FixedBudget
from models.kvm.kernels.compile import Compiled
from models.kvm.kernels.report import occupancy, roofline
from models.kvm.kernels.tuning import TARGETS


def test_reads_cost_what_they_see() -> None:
    rows = {
        (row.kernel, row.device): row
        for row in roofline(FixedBudget(slots=4), 16, batch=1, heads=1, width=8, chunk=4, window_chunks=2)
    }
    # Blocks of 4 tokens see 1+2+3+4, then 5+6+7+8 tokens twice more, and 4 slots each in the last two.
    window, state = 10 + 3 * 26, 2 * 4 * 4
    read = rows["read", "H200"]
    assert read.flops == 4 * 8 * (window + state)
    assert read.bytes == 2 * 8 * (4 * 16 + 2 * 2 * 4)
    assert rows["read_backward_window", "MI325X"].flops == 8 * 8 * window
    assert rows["read_backward_slots", "MI325X"].flops == 8 * 8 * state
    assert read.floor_seconds == pytest.approx(read.bytes / 4.8e12)
    assert read.bound == "memory"


def test_the_decoded_token_reads_the_state_once() -> None:
    rows = roofline(FixedBudget(slots=256), 32768, batch=1, heads=1, width=128)
    decode = next(row for row in rows if row.kernel == "decode")
    assert decode.bytes == 256 * 257 * 4 + 257 * 2 * 128 * 2


@pytest.mark.parametrize(
    ("name", "registers", "shared", "warps", "wanted"),
    [
        ("sm_90", 128, 0, 4, 0.25),  # 65536 registers hold 4 programs of 128 threads, 16 of 64 warps
        ("sm_90", 32, 100 * 1024, 4, 0.125),  # shared memory holds 2
        ("gfx942", 256, 0, 4, 0.25),  # 2 waves on each SIMD
        ("gfx942", 64, 40 * 1024, 4, 0.125),  # 64 KiB hold one program
        ("gfx942", 64, 32 * 1024, 4, 0.25),  # and two of half their size
    ],
)
def test_occupancy_is_bounded_by_registers_and_shared_memory(
    name: str, registers: int, shared: int, warps: int, wanted: float
) -> None:
    compiled = Compiled("read_kernel", name, registers, 0, shared, warps, 0, {}, 0)
    assert occupancy(compiled, TARGETS[name]) == wanted
