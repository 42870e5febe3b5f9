"""What the kernels ask of a GPU, without one: the compiler's numbers, and the least time there can be."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch

from models.kvm.kernels.compile import Compiled, compile_launch
from models.kvm.kernels.roofline import RooflineRow, roofline
from models.kvm.kernels.samples import sample_launches
from models.kvm.kernels.tuning import TARGETS, Target

__all__ = ["CompileRow", "RooflineRow", "compile_report", "roofline"]

GPU_NAMES = tuple(name for name, target in TARGETS.items() if target.backend != "interpreter")


@dataclass(frozen=True)
class CompileRow:
    """One kernel at one shape class on one target."""

    kernel: str
    target: str
    dtype: str
    width: int
    registers: int
    spills: int
    shared_bytes: int
    warps: int
    instructions: int
    matrix_instructions: dict[str, int]
    occupancy: float  # at most, as a share of the warps or waves that a unit can hold

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def compile_report(
    targets: Iterable[str] = GPU_NAMES,
    dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float32),
    widths: Iterable[int] = (64, 128, 256),
) -> list[CompileRow]:
    """Compiles every kernel for every target and shape class: minutes on one core."""
    rows = []
    for name in targets:
        for dtype in dtypes:
            for width in widths:
                for launch in sample_launches(TARGETS[name], dtype, width):
                    rows.append(_row(compile_launch(launch), TARGETS[name], dtype, width))
    return rows


def _row(compiled: Compiled, target: Target, dtype: torch.dtype, width: int) -> CompileRow:
    return CompileRow(
        compiled.kernel,
        compiled.target,
        str(dtype).removeprefix("torch."),
        width,
        compiled.registers,
        compiled.spills,
        compiled.shared_bytes,
        compiled.warps,
        compiled.instructions,
        compiled.matrix_instructions,
        occupancy(compiled, target),
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
    by_shared = (target.shared_bytes + reserved) // (compiled.shared_bytes + max(reserved, 1))
    programs = min(by_registers, by_shared, most // compiled.warps)
    return programs * compiled.warps / most


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step
