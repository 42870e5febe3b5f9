"""Every kernel and tuning row compiles for GPUs that are not here, fits them, and uses their matrix units."""

import os

import pytest
import torch

from models.kvm.kernels.compile import compile_launch
from models.kvm.kernels.report import GPU_NAMES
from models.kvm.kernels.samples import sample_launches
from models.kvm.kernels.tuning import (
    KERNELS,
    OTHER_CUDA,
    OTHER_HIP,
    TARGETS,
    Shape,
    Target,
    choose,
    shared_estimate,
)

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels do not compile"
)

WITHOUT_PRODUCTS = {
    "prepare_keys_kernel",
    "prepare_keys_backward_kernel",
    "norm_slots_kernel",
    "append_kernel",
    "sort_kernel",
    "fold_keys_kernel",
    "walk_kernel",
    "share_out_kernel",
    "delta_kernel",
    "decode_kernel",
    "join_pieces_kernel",
}
WITH_PRODUCTS = {
    "route_kernel",
    "route_new_kernel",
    "read_kernel",
    "read_backward_queries_kernel",
    "read_backward_slots_kernel",
    "read_backward_window_kernel",
}
# The shapes of the paper everywhere; the other shape classes take minutes: KVM_DIST_COMPILE_ALL=1.
QUICK = [(name, torch.bfloat16, 128) for name in GPU_NAMES]
OTHERS = [
    (name, dtype, width)
    for name in GPU_NAMES
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for width in (64, 128, 256)
    if (name, dtype, width) not in QUICK and (dtype != torch.float16 or width == 128)
]
WANTED = QUICK + (OTHERS if os.environ.get("KVM_DIST_COMPILE_ALL") == "1" else [])


@pytest.mark.parametrize(("name", "dtype", "width"), WANTED)
def test_kernels_fit_and_use_matrix_units(name: str, dtype: torch.dtype, width: int) -> None:
    target = TARGETS[name]
    compiled = [compile_launch(launch) for launch in sample_launches(target, dtype, width)]
    assert {one.kernel for one in compiled} == WITH_PRODUCTS | WITHOUT_PRODUCTS
    for one in compiled:
        assert one.shared_bytes <= target.shared_bytes, one
        # Long scalar loops may park a few words, such as their place, on the stack: no row of a tile.
        parked = 0 if one.kernel in WITH_PRODUCTS or (name, dtype, width) in QUICK else 64
        if one.kernel.startswith("read") and (dtype.itemsize, width) == (4, 256) and target.backend == "cuda":
            continue  # exact float32 products without matrix units: three tf32 passes need more registers
        assert one.spills <= parked, one
        assert one.uses_matrix_units == (one.kernel in WITH_PRODUCTS), one


@pytest.mark.parametrize("target", [*TARGETS.values(), OTHER_CUDA, OTHER_HIP], ids=lambda one: one.name)
@pytest.mark.parametrize("width", [1, 5, 64, 100, 128, 256])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_every_kernel_has_a_row_that_fits(target: Target, width: int, element_bytes: int) -> None:
    shape = Shape(width, element_bytes)
    for kernel in KERNELS:
        tile = choose(kernel, target, shape)
        assert shared_estimate(kernel, tile, target, shape) <= target.shared_bytes, kernel


def test_estimates_of_shared_memory_are_no_smaller_than_what_the_compiler_takes() -> None:
    kernels = {
        "route_kernel": "route",
        "read_kernel": "read",
        "read_backward_queries_kernel": "read_backward_queries",
    }
    for name in ("sm_90", "gfx942"):
        for launch in sample_launches(TARGETS[name], torch.bfloat16, 128):
            kernel = kernels.get(launch.kernel.__name__)
            if kernel is not None:
                taken = compile_launch(launch).shared_bytes
                shape = Shape(128, 2)
                assert taken <= shared_estimate(kernel, launch.tile, TARGETS[name], shape), kernel  # type: ignore[arg-type]
