"""Block sizes of every kernel: static rows, chosen by architecture and shape, never by timing.

Ranks that timed kernels themselves would choose different rows, and results would differ between them.
"""

from dataclasses import dataclass, field
from typing import Literal

Kernel = Literal[
    "prepare_keys", "route", "fold", "read", "read_backward_queries", "read_backward_slots",
    "read_backward_window", "rows", "decode",
]  # fmt: skip
KERNELS: tuple[Kernel, ...] = (
    "prepare_keys", "route", "fold", "read", "read_backward_queries", "read_backward_slots",
    "read_backward_window", "rows", "decode",
)  # fmt: skip

KIBI = 1024
SMALLEST_DOT = 16  # tiles of a matrix product have at least this many rows and columns


@dataclass(frozen=True)
class Target:
    """What a row must fit."""

    name: str
    backend: Literal["cuda", "hip", "interpreter"]
    shared_bytes: int  # of one program, at most
    float32_dot: (
        str  # `input_precision` of float32 products: near float32, on matrix units where there are any
    )


TARGETS: dict[str, Target] = {
    "sm_90": Target("sm_90", "cuda", 227 * KIBI, "tf32x3"),
    "sm_100": Target("sm_100", "cuda", 227 * KIBI, "tf32x3"),
    "gfx942": Target("gfx942", "hip", 64 * KIBI, "ieee"),
    "gfx950": Target("gfx950", "hip", 160 * KIBI, "ieee"),
    "interpreter": Target("interpreter", "interpreter", 64 * KIBI, "ieee"),
}
OTHER_CUDA = Target("cuda", "cuda", 64 * KIBI, "tf32x3")  # sm_80 and later hold at least 99 KiB
OTHER_HIP = Target("hip", "hip", 64 * KIBI, "ieee")


@dataclass(frozen=True)
class Tile:
    """One row: BLOCK_M rows of the output side (or of a plain pass), BLOCK_N of the side looped over."""

    block_m: int
    block_n: int = 0
    warps: int = 4
    stages: int = 1
    waves_per_eu: int = 0  # AMD: 0 leaves it to the compiler
    matrix_instr_nonkdim: int = 16  # AMD: MFMA of 16x16 or 32x32

    def options(self, target: Target) -> dict[str, int | bool]:
        """Launch options; all that move between Triton versions are set."""
        options: dict[str, int | bool] = {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,
        }
        if target.backend == "hip":
            options["waves_per_eu"] = self.waves_per_eu
            options["matrix_instr_nonkdim"] = self.matrix_instr_nonkdim
        return options


@dataclass(frozen=True)
class Shape:
    """The class of a call: padded head width and bytes of an input element."""

    width: int
    element_bytes: int
    block_d: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_d", max(SMALLEST_DOT, 1 << (self.width - 1).bit_length()))


def choose(kernel: Kernel, target: Target, shape: Shape) -> Tile:
    return Tile(16, 16)
