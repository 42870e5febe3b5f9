"""Which tiles `kvm-dist bench kvm --tune` tries: those one step away from a tile, as far as they may fit."""

from collections.abc import Iterator
from dataclasses import replace

from models.kvm.kernels.tuning import SMALLEST_DOT, Kernel, Shape, Target, Tile, shared_estimate

_ROWS_ONLY: tuple[Kernel, ...] = ("prepare_keys", "fold")  # kernels whose tiles are BLOCK_M rows
_KEYS_ONLY: tuple[Kernel, ...] = ("decode",)
_WITHOUT_PRODUCTS: tuple[Kernel, ...] = ("prepare_keys", "fold", "rows", "decode")
_LARGEST_BLOCK, _MOST_WARPS, _MOST_STAGES = 256, 16, 4


def neighbours(kernel: Kernel, tile: Tile, target: Target, shape: Shape) -> Iterator[Tile]:
    """Tiles that differ from `tile` in one size that matters to the kernel."""
    for one in _steps(kernel, tile, target):
        if shared_estimate(kernel, one, target, shape) <= target.shared_bytes:
            yield one


def _steps(kernel: Kernel, tile: Tile, target: Target) -> Iterator[Tile]:
    smallest = 1 if kernel in _WITHOUT_PRODUCTS else SMALLEST_DOT
    if kernel not in _KEYS_ONLY:
        for block in _around(tile.block_m, smallest, _LARGEST_BLOCK):
            # The second size of these kernels' tiles is not used: it goes along.
            yield replace(tile, block_m=block, block_n=block if kernel in _ROWS_ONLY else tile.block_n)
    if kernel not in _ROWS_ONLY:
        for block in _around(tile.block_n, smallest, _LARGEST_BLOCK):
            yield replace(tile, block_n=block)
    for warps in _around(tile.warps, 1, _MOST_WARPS):
        yield replace(tile, warps=warps)
    if kernel in _WITHOUT_PRODUCTS:
        return
    for stages in (tile.stages - 1, tile.stages + 1):
        if 1 <= stages <= _MOST_STAGES:
            yield replace(tile, stages=stages)
    if target.backend == "hip":
        yield replace(tile, matrix_instr_nonkdim=48 - tile.matrix_instr_nonkdim)
        yield replace(tile, waves_per_eu=0 if tile.waves_per_eu else 2)


def _around(size: int, least: int, most: int) -> Iterator[int]:
    return (other for other in (size // 2, size * 2) if least <= other <= most)
