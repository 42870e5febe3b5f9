"""Every kernel and tuning row compiles for GPUs that are not here, fits them, and uses their matrix units."""

import os
from collections.abc import Iterator

import pytest
import torch

from models.kvm.kernels.report import Rows, ShapeClass, compiling, shape_classes, variant
from models.kvm.kernels.samples import sample_launches
from models.kvm.kernels.tuning import (
    KERNELS,
    OTHER_CUDA,
    OTHER_HIP,
    ROWS,
    TARGETS,
    Kernel,
    Shape,
    Target,
    choose,
    rows_covering,
    shared_estimate,
)

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels do not compile"
)

WITHOUT_PRODUCTS = {
    "prepare_keys_kernel",
    "prepare_keys_backward_kernel",
    "norm_slots_kernel",
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
    "append_kernel",
    "read_kernel",
    "read_backward_queries_kernel",
    "read_backward_slots_kernel",
    "read_backward_window_kernel",
}
AFTER_A_STATE = {"norm_slots_kernel", "decode_kernel", "join_pieces_kernel"}
ESTIMATED: dict[str, Kernel] = {
    "route_kernel": "route",
    "read_kernel": "read",
    "read_backward_queries_kernel": "read_backward_queries",
}
# The published shape everywhere; all shape classes take minutes: `.ci/kernels`.
WANTED = shape_classes(every=os.environ.get("KVM_DIST_COMPILE_ALL") == "1")
Compiled = dict[ShapeClass, Rows]


@pytest.fixture(scope="module")
def compiled() -> Iterator[Compiled]:
    """Each test waits for its own class: all of them take longer than a test may."""
    with compiling(WANTED, workers=min(len(WANTED), len(os.sched_getaffinity(0)))) as found:
        yield found


@pytest.mark.parametrize("one", WANTED, ids=str)
def test_kernels_fit_do_not_spill_and_use_matrix_units(one: ShapeClass, compiled: Compiled) -> None:
    target, rows = TARGETS[one.target], compiled[one].result()
    left_out = AFTER_A_STATE if one.switched else set()
    assert {row.kernel for row in rows} == (WITH_PRODUCTS | WITHOUT_PRODUCTS) - left_out
    # Float32 products of such width are exact, since three tf32 passes do not fit into registers.
    exact = (one.dtype.itemsize, one.width, target.backend) == (4, 256, "cuda")
    for row in rows:
        assert row.shared_bytes <= target.shared_bytes, row
        assert row.spills == 0, row
        if not (exact and row.kernel.startswith("read")):
            assert bool(row.matrix_instructions) == (row.kernel in WITH_PRODUCTS), row


@pytest.mark.parametrize("one", [one for one in WANTED if TARGETS[one.target].backend == "hip"], ids=str)
def test_amd_gpus_reach_memory_as_a_launch_would_have_it(one: ShapeClass, compiled: Compiled) -> None:
    for row in compiled[one].result():
        if one.memory == "buffers":
            assert row.buffer_instructions > 0, row
        elif one.memory == "no buffers":
            assert row.buffer_instructions == 0, row


@pytest.mark.parametrize("one", WANTED, ids=str)
def test_estimates_of_shared_memory_are_no_smaller_than_what_the_compiler_takes(
    one: ShapeClass, compiled: Compiled
) -> None:
    target, shape = TARGETS[one.target], Shape(one.width, one.dtype.itemsize)
    for row in compiled[one].result():
        if kernel := ESTIMATED.get(row.kernel):
            tile = choose(kernel, target, shape)
            assert row.shared_bytes <= shared_estimate(kernel, tile, target, shape), row


def test_rows_of_one_class_are_told_apart() -> None:
    launches = sample_launches(TARGETS["sm_90"], torch.bfloat16, 128)
    told = [(launch.kernel.__name__, variant(launch, launches)) for launch in launches]
    assert len(set(told)) == len(told)
    assert ("route_kernel", "APPENDS=False") in told
    assert ("sort_kernel", "") in told


def test_all_shape_classes_take_all_rows() -> None:
    taken = set()
    for one in shape_classes():
        shape = Shape(one.width, one.dtype.itemsize)
        taken |= {next(rows_covering(kernel, TARGETS[one.target], shape)) for kernel in KERNELS}
    assert taken == {row for row in ROWS if row.chips != "interpreter"}


@pytest.mark.parametrize("target", [*TARGETS.values(), OTHER_CUDA, OTHER_HIP], ids=lambda one: one.name)
@pytest.mark.parametrize("width", [1, 5, 64, 100, 128, 256])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_every_kernel_has_a_row_that_fits(target: Target, width: int, element_bytes: int) -> None:
    shape = Shape(width, element_bytes)
    for kernel in KERNELS:
        tile = choose(kernel, target, shape)
        assert shared_estimate(kernel, tile, target, shape) <= target.shared_bytes, kernel
