"""Block sizes of every kernel: static rows, chosen by architecture and shape, never by timing.

Ranks that timed kernels themselves would choose different rows, and results would differ between them. A row
is taken when its shape class matches and its estimated shared memory fits the device; the last row of every
kernel fits any device at any shape: 64 KiB on AMD, 99 KiB on NVIDIA. Rows that `kvm-dist bench kvm --tune`
measured go before these: they are part of the package too, see `measured.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

Kernel = Literal[
    "prepare_keys",
    "rows",  # passes over single rows: delta, sorting
    "route",
    "fold",  # fold, walk and share out
    "read",
    "read_backward_queries",
    "read_backward_slots",
    "read_backward_window",
    "decode",
]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
# Functions that are not named after their kernel.
_KERNEL_OF: dict[str, Kernel] = {
    "prepare_keys_backward": "prepare_keys",
    "delta": "rows",
    "sort": "rows",
    "append": "route",
    "norm_slots": "fold",
    "fold_keys": "fold",
    "walk": "fold",
    "share_out": "fold",
    "join_pieces": "decode",
}

WIDEST_HEAD = 256
LONGEST_CHUNK = 512
MOST_ROWS = 2**16 - 1  # a grid is no wider along its second axis, nor its third
KIBI = 1024
SMALLEST_DOT = 16  # tiles of a matrix product have at least this many rows and columns
SHARED_MARGIN = 2 * KIBI  # reductions need some scratch beside the tiles
PROGRAMS_PER_UNIT = 2  # of the routing kernel: one computes while the other loads


@dataclass(frozen=True)
class Target:
    """What a row must fit."""

    name: str
    backend: Literal["cuda", "hip", "interpreter"]
    shared_bytes: int  # of one program, at most
    float32_dot: str  # `input_precision` of float32 products: near float32, on matrix units if there are any
    units: int  # multiprocessors, or compute units, that a launch should fill


TARGETS: dict[str, Target] = {
    "sm_90": Target("sm_90", "cuda", 227 * KIBI, "tf32x3", 132),
    "sm_100": Target("sm_100", "cuda", 227 * KIBI, "tf32x3", 148),
    "gfx942": Target("gfx942", "hip", 64 * KIBI, "ieee", 304),
    "gfx950": Target("gfx950", "hip", 160 * KIBI, "ieee", 256),
    "interpreter": Target("interpreter", "interpreter", 2**30, "ieee", 8),
}
OTHER_CUDA = Target("cuda", "cuda", 99 * KIBI, "ieee", 108)  # the least of sm_80 and later
OTHER_HIP = Target("hip", "hip", 64 * KIBI, "ieee", 110)


@dataclass(frozen=True)
class Tile:
    """BLOCK_M queries (or tokens, or slots of a pass without products) by BLOCK_N keys."""

    block_m: int
    block_n: int
    warps: int = 4
    stages: int = 1
    waves_per_eu: int = 0  # AMD: 0 leaves it to the compiler
    matrix_instr_nonkdim: int = 16  # AMD: MFMA of 16x16 or 32x32
    registers: int = 0  # NVIDIA: at most; 0: ptxas may spill a few so that one more program fits
    fused: bool = True  # multiply-adds; not where ranks must round sums and products alike

    def options(self, target: Target) -> dict[str, int | bool]:
        """Launch options; all whose defaults move between Triton versions are set."""
        options: dict[str, int | bool] = {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": self.fused,
        }
        if target.backend == "cuda" and self.registers:
            options["maxnreg"] = self.registers
        if target.backend == "hip":
            options["waves_per_eu"] = self.waves_per_eu
            options["matrix_instr_nonkdim"] = self.matrix_instr_nonkdim
        return options


@dataclass(frozen=True)
class Shape:
    """The class of a call: head width and bytes of an input element."""

    width: int
    element_bytes: int

    @property
    def block_d(self) -> int:
        """The width padded for tiles."""
        return max(SMALLEST_DOT, 1 << (self.width - 1).bit_length())


@dataclass(frozen=True)
class Row:
    kernel: Kernel
    chips: str  # a backend, a target, or "any"
    widest: int  # head width, at most
    element_bytes: int  # of an input element, at most
    tile: Tile
    measured: bool = False  # on that chip: for this width and these bytes alone, and known to fit

    def covers(self, kernel: Kernel, target: Target, shape: Shape) -> bool:
        if self.measured:
            own = (self.kernel, self.chips, self.widest, self.element_bytes)
            return own == (kernel, target.name, shape.block_d, shape.element_bytes)
        return (
            self.kernel == kernel
            and self.chips in ("any", target.backend, target.name)
            and shape.block_d <= self.widest
            and shape.element_bytes <= self.element_bytes
            and shared_estimate(self.kernel, self.tile, target, shape) <= target.shared_bytes
        )


# The first row that covers a call is taken.
ROWS: tuple[Row, ...] = (
    # The interpreter pays per operation, not per element; small tiles still cross every edge.
    Row("fold", "interpreter", 256, 4, Tile(32, 32)),
    *(Row(kernel, "interpreter", 256, 4, Tile(16, 16)) for kernel in get_args(Kernel)),
    Row("prepare_keys", "any", 128, 4, Tile(32, 32, fused=False)),
    Row("prepare_keys", "any", 256, 4, Tile(16, 16, fused=False)),
    Row("rows", "hip", 256, 4, Tile(32, 8, 8)),
    Row("rows", "any", 128, 4, Tile(32, 16, 8)),
    Row("rows", "any", 256, 4, Tile(16, 16, 8)),
    Row("fold", "cuda", 128, 4, Tile(16, 16, 8, fused=False, registers=168)),
    Row("fold", "any", 128, 4, Tile(16, 16, 8, fused=False)),
    Row("fold", "any", 256, 4, Tile(8, 8, 8, fused=False, registers=168)),
    Row("decode", "any", 128, 4, Tile(32, 32)),
    Row("decode", "any", 256, 4, Tile(16, 16, 8)),
    # NVIDIA: warp groups of 64 rows feed the matrix units; three tf32 passes need many registers.
    Row("route", "cuda", 128, 4, Tile(64, 32, 8)),
    Row("route", "cuda", 256, 4, Tile(16, 32, 8)),
    Row("read", "cuda", 128, 2, Tile(128, 64, 8, 2)),
    Row("read", "cuda", 256, 2, Tile(64, 32, 8)),
    Row("read", "cuda", 64, 4, Tile(64, 32, 8)),
    Row("read", "cuda", 128, 4, Tile(16, 32, 8)),
    Row("read_backward_queries", "cuda", 128, 2, Tile(128, 64, 8, 2)),
    Row("read_backward_queries", "cuda", 256, 2, Tile(32, 32, 8)),
    Row("read_backward_queries", "cuda", 64, 4, Tile(64, 32, 8)),
    Row("read_backward_queries", "cuda", 128, 4, Tile(16, 32, 8)),
    Row("read_backward_slots", "sm_90", 128, 2, Tile(32, 64, 8)),
    Row("read_backward_slots", "cuda", 128, 2, Tile(64, 64, 8)),
    Row("read_backward_slots", "cuda", 256, 2, Tile(32, 32, 8)),
    Row("read_backward_slots", "cuda", 64, 4, Tile(32, 32, 8)),
    Row("read_backward_window", "cuda", 128, 2, Tile(64, 64, 8, 2)),
    Row("read_backward_window", "cuda", 256, 2, Tile(32, 32, 8)),
    Row("read_backward_window", "cuda", 64, 4, Tile(32, 32, 8)),
    # AMD: one or two stages, since 64 KiB hold few tiles.
    Row("route", "hip", 128, 4, Tile(64, 32, 8, 2)),
    Row("read", "gfx950", 128, 2, Tile(128, 64)),
    Row("read", "hip", 128, 2, Tile(128, 64, 4, 2)),
    Row("read", "hip", 64, 4, Tile(128, 64)),
    Row("read", "hip", 128, 4, Tile(64, 32)),
    Row("read", "hip", 256, 2, Tile(64, 32)),
    Row("read_backward_queries", "hip", 64, 4, Tile(128, 32)),
    Row("read_backward_queries", "hip", 128, 2, Tile(128, 32)),
    Row("read_backward_queries", "hip", 128, 4, Tile(64, 16)),
    Row("read_backward_slots", "hip", 64, 4, Tile(32, 128)),
    Row("read_backward_slots", "hip", 128, 2, Tile(64, 64)),
    Row("read_backward_slots", "hip", 128, 4, Tile(32, 64)),
    Row("read_backward_window", "hip", 64, 4, Tile(32, 128)),
    Row("read_backward_window", "hip", 128, 2, Tile(32, 128)),
    Row("read_backward_window", "hip", 128, 4, Tile(32, 64)),
    # What always fits.
    Row("route", "any", 256, 4, Tile(32, 16, 8)),
    *(
        Row(kernel, chips, 256, 4, Tile(16, 16, warps, registers=255 if chips == "cuda" else 0))
        for chips, warps in (("cuda", 8), ("any", 4))
        for kernel in get_args(Kernel)
        if kernel.startswith("read") and (chips, kernel) != ("cuda", "read_backward_queries")
    ),
)


def read_precision(target: Target, shape: Shape) -> str:
    """`input_precision` of products of the inputs' own dtype; it matters to float32 only.

    Three tf32 passes over tiles of 256 columns do not fit into registers.
    """
    return "ieee" if shape.block_d > 128 else target.float32_dot


def multiplies_without_units(target: Target, shape: Shape) -> bool:
    """Whether reads multiply without matrix units: each thread then holds whole rows, and few of them fit."""
    return target.backend == "cuda" and shape.element_bytes == 4 and read_precision(target, shape) == "ieee"


def shared_estimate(kernel: Kernel, tile: Tile, target: Target, shape: Shape) -> int:
    """Bytes of shared memory that a row asks for, rounded up.

    Looped tiles are held once per stage; once less where loads pass through registers (AMD before gfx950).
    """
    element = 4 if kernel == "route" else shape.element_bytes
    row = shape.block_d * element
    through_registers = target.backend == "hip" and target.name != "gfx950"
    copies = max(1, tile.stages - through_registers)
    precision = target.float32_dot if kernel == "route" else read_precision(target, shape)
    split = 2 if element == 4 and precision == "tf32x3" else 1  # high and low parts of float32
    scores = tile.block_m * tile.block_n * element
    if kernel == "route":
        held, looped = tile.block_m, tile.block_n
    elif kernel == "read":
        held, looped = tile.block_m, 2 * tile.block_n
    elif kernel == "read_backward_queries":
        held, looped = 2 * tile.block_m, 2 * tile.block_n
    elif kernel in ("read_backward_slots", "read_backward_window"):
        held, looped = 2 * tile.block_n, 2 * tile.block_m
    else:
        return SHARED_MARGIN + 4 * KIBI * tile.warps
    tiles = held + copies * looped
    if target.backend == "hip":  # operands that stay pass through shared memory once, into registers
        tiles = max(tile.block_m, tile.block_n, copies * looped)
    return split * (tiles * row + scores) + SHARED_MARGIN


def route_share(tile: Tile, target: Target, chunk: int, rows: int, slots: int) -> int:
    """Slots that one program of the routing kernel looks at, so that few rows fill the device too.

    What is found does not depend on it, to the last bit: every score is formed alike, and a maximum is exact.
    """
    token_tiles, slot_tiles = -(-chunk // tile.block_m), -(-slots // tile.block_n)
    shares = min(PROGRAMS_PER_UNIT * target.units // (token_tiles * rows), slot_tiles)
    return -(-slot_tiles // max(shares, 1)) * tile.block_n


def ranked_at_once(target: Target, padded_chunk: int) -> int:
    """Scores that each of a chunk's tokens is compared with at once, when some open slots.

    As many as registers hold: on AMD a comparison's outcome takes two scalar ones, of which there are about
    a hundred. What is found does not depend on it.
    """
    comparisons = 1024 if target.backend == "hip" else 4096
    return min(SMALLEST_DOT, comparisons // padded_chunk)


def route_programs(target: Target, shape: Shape, chunk: int, rows: int, slots: int) -> int:
    """Programs of one launch of the routing kernel; rows: heads of all batch entries."""
    tile = choose("route", target, shape)
    share = route_share(tile, target, chunk, rows, slots)
    return rows * -(-chunk // tile.block_m) * -(-slots // share)


def kernel_of(function_name: str) -> Kernel:
    """Whose rows a jitted function is launched with."""
    name = function_name.removesuffix("_kernel")
    found = [kernel for kernel in KERNELS if kernel == _KERNEL_OF.get(name, name)]
    assert found, f"no rows for the function {function_name}"
    return found[0]


_on_trial: list[tuple[Kernel, Tile]] = []  # in all threads: on a GPU autograd runs a backward in its own


@contextmanager
def on_trial(kernel: Kernel, tile: Tile) -> Iterator[None]:
    """Inside, that kernel is launched with that tile: how `bench kvm --tune` tries one."""
    _on_trial.append((kernel, tile))
    try:
        yield
    finally:
        _on_trial.pop()


def rows_covering(kernel: Kernel, target: Target, shape: Shape) -> Iterator[Row]:
    from models.kvm.kernels.measured import measured_rows  # it reads rows of this module's type

    return (row for row in (*measured_rows(), *ROWS) if row.covers(kernel, target, shape))


def choose(kernel: Kernel, target: Target, shape: Shape) -> Tile:
    if _on_trial and _on_trial[-1][0] == kernel:
        return _on_trial[-1][1]
    return _chosen(kernel, target, shape)


@cache
def _chosen(kernel: Kernel, target: Target, shape: Shape) -> Tile:
    """Looked up once: a launch asks every time."""
    return next(rows_covering(kernel, target, shape)).tile
