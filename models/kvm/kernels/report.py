"""What the kernels ask of a GPU, without one: the compiler's numbers, and the least time there can be."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import get_args

import torch

from models.kvm.kernels.compile import Compiled, Memory, compile_launch
from models.kvm.kernels.launch import Launch
from models.kvm.kernels.roofline import RooflineRow, roofline
from models.kvm.kernels.samples import ShapeClass, sample_launches
from models.kvm.kernels.tuning import TARGETS, Target

__all__ = ["CompileRow", "RooflineRow", "ShapeClass", "compile_report", "roofline", "shape_classes"]

GPU_NAMES = tuple(name for name, target in TARGETS.items() if target.backend != "interpreter")
PUBLISHED = (torch.bfloat16, 128)  # inputs and head width of arXiv 2605.09877, Section 5


@dataclass(frozen=True)
class CompileRow:
    """One kernel at one shape class on one target."""

    kernel: str
    target: str
    dtype: str
    width: int
    chunk: int
    registers: int
    spills: int
    shared_bytes: int
    warps: int
    instructions: int
    matrix_instructions: dict[str, int]
    occupancy: float  # at most, as a share of the warps or waves that a unit can hold
    memory: Memory
    buffer_instructions: int
    variant: str = ""  # constants by which the kernel's rows of one class differ

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


Rows = Future[list[CompileRow]]


def shape_classes(every: bool = True) -> list[ShapeClass]:
    """Those that take every row of `tuning.py`, slowest to compile first; False: the published shape alone.

    Chunks of 512 and float16, which share their rows with others, come once for each vendor, the other ways
    to reach memory once for each GPU of AMD's, and the operator's switches once for each.
    """
    published = [ShapeClass(name, *PUBLISHED) for name in GPU_NAMES]
    if not every:
        return published
    others = [
        ShapeClass(name, dtype, width)
        for dtype, width in (
            (torch.float32, 128),
            (torch.float32, 256),
            (torch.bfloat16, 256),
            (torch.float32, 64),
            (torch.bfloat16, 64),
        )
        for name in GPU_NAMES
    ]
    for name in ("sm_90", "gfx942"):
        others += [ShapeClass(name, torch.float16, 128), ShapeClass(name, *PUBLISHED, chunk=512)]
    for name in ("gfx942", "gfx950"):
        others += [ShapeClass(name, *PUBLISHED, memory=memory) for memory in get_args(Memory)[1:]]
    others += [ShapeClass(name, *PUBLISHED, switched=True) for name in GPU_NAMES]
    return [*others, *published]


def compile_report(
    classes: Sequence[ShapeClass],
    workers: int,
    finished: Callable[[ShapeClass], None] = lambda _: None,
) -> list[CompileRow]:
    """Every kernel of some shape classes, in their order: about 15 seconds a class on one core."""
    with compiling(classes, workers) as found:
        classes_of = {rows: one for one, rows in found.items()}
        for done in as_completed(classes_of):
            done.result()
            finished(classes_of[done])
    return [row for one in classes for row in found[one].result()]


@contextmanager
def compiling(classes: Sequence[ShapeClass], workers: int) -> Iterator[dict[ShapeClass, Rows]]:
    """Inside, processes compile one class after the other, in their order; what is not begun at the end is
    left out."""
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        yield {one: pool.submit(compile_class, one) for one in classes}
    finally:
        pool.shutdown(cancel_futures=True)


def compile_class(one: ShapeClass) -> list[CompileRow]:
    return list(_rows(one))


def _rows(one: ShapeClass) -> Iterator[CompileRow]:
    target = TARGETS[one.target]
    launches = sample_launches(target, one.dtype, one.width, one.chunk, one.switched)
    for launch in launches:
        yield _row(compile_launch(launch, one.memory), target, one, variant(launch, launches))


def variant(launch: Launch, launches: Sequence[Launch]) -> str:
    """The constants by which a launch differs from others of its kernel."""
    others = [one.constants for one in launches if one.kernel is launch.kernel]
    return ", ".join(
        f"{name}={value}"
        for name, value in launch.constants.items()
        if any(constants[name] != value for constants in others)
    )


def _row(compiled: Compiled, target: Target, one: ShapeClass, variant: str) -> CompileRow:
    return CompileRow(
        compiled.kernel,
        compiled.target,
        str(one.dtype).removeprefix("torch."),
        one.width,
        one.chunk,
        compiled.registers,
        compiled.spills,
        compiled.shared_bytes,
        compiled.warps,
        compiled.instructions,
        compiled.matrix_instructions,
        occupancy(compiled, target),
        one.memory,
        compiled.buffer_instructions,
        variant,
    )


def occupancy(compiled: Compiled, target: Target) -> float:
    """The largest share of a unit's warps that registers and shared memory let run at once."""
    if target.backend == "cuda":
        by_registers = 65536 // (32 * compiled.warps * _rounded_up(max(compiled.registers, 1), 8))
        most, reserved = 64, 1024  # warps of a multiprocessor; shared bytes it keeps per program
    else:
        waves = min(8, 512 // _rounded_up(max(compiled.registers, 1), 8))
        by_registers = 4 * waves // compiled.warps
        most, reserved = 32, 0  # waves of a compute unit, eight on each of four SIMDs
    by_shared = (target.shared_bytes + reserved) // max(compiled.shared_bytes + reserved, 1)
    programs = min(by_registers, by_shared, most // compiled.warps)
    return programs * compiled.warps / most


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step
