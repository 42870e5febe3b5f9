"""The search for faster tiles, on times that are made up."""

from collections.abc import Iterator, Mapping
from itertools import count

import pytest

from kvm_dist.bench.tuning import Found, Search
from models.kvm.kernels.candidates import neighbours
from models.kvm.kernels.tuning import (
    KERNELS,
    TARGETS,
    Kernel,
    Shape,
    Target,
    Tile,
    choose,
    shared_estimate,
)

HALF, H200 = Shape(128, 2), TARGETS["sm_90"]


class MadeUp:
    """Kernels that are fastest with few warps and square tiles; `broken` does not run."""

    target: Target = H200
    shape = HALF

    def __init__(self, broken: Tile | None = None) -> None:
        self.broken, self.asked = broken, []  # type: tuple[Tile | None, list[tuple[Kernel, Tile]]]

    def default(self) -> Mapping[Kernel, float]:
        return {"read": self.seconds(choose("read", H200, HALF)), "route": 100.0, "decode": 1e-3}

    def run(self, kernel: Kernel, tile: Tile) -> float | None:
        self.asked.append((kernel, tile))
        if tile == self.broken:
            return None
        return self.seconds(tile) if kernel == "read" else 99.0

    def seconds(self, tile: Tile) -> float:
        return tile.warps + max(tile.block_m, tile.block_n) / min(tile.block_m, tile.block_n)


def found_by(trials: MadeUp, deadline: float = 1e9) -> tuple[list[Found], list[str]]:
    said: list[str] = []
    ticks = count()
    search = Search(trials, deadline, said.append, clock=lambda: float(next(ticks)))
    return list(search.run()), said


def test_the_search_goes_downhill_to_the_fastest_tile_and_starts_with_the_slowest_kernel() -> None:
    trials = MadeUp()
    (found,), said = found_by(trials)
    assert (found.kernel, found.seconds) == ("read", 2.0)
    assert found.tile.warps == 1
    assert found.tile.block_m == found.tile.block_n
    assert found.default_seconds == trials.seconds(choose("read", H200, HALF))
    assert [line.split(":")[0] for line in said] == ["route", "read", "decode"]
    assert len(set(trials.asked)) == len(trials.asked), "no tile is tried twice"


def test_a_gain_that_may_be_noise_is_none() -> None:
    assert [one.kernel for one in found_by(MadeUp())[0]] == ["read"]  # route goes from 100 to 99


def test_a_tile_that_does_not_run_or_is_wrong_is_never_taken() -> None:
    fastest = found_by(MadeUp())[0][0].tile
    trials = MadeUp(broken=fastest)
    (found,), _ = found_by(trials)
    assert ("read", fastest) in trials.asked
    assert found.tile != fastest


def test_kernels_that_the_time_does_not_reach_are_named() -> None:
    found, said = found_by(MadeUp(), deadline=3)
    assert found == []
    assert said[-1] == "decode: left out, the time is over"


def reachable(kernel: Kernel, target: Target) -> Iterator[Tile]:
    tiles = [choose(kernel, target, HALF)]
    for tile in tiles:
        tiles += [one for one in neighbours(kernel, tile, target, HALF) if one not in tiles]
        yield tile


@pytest.mark.parametrize("name", ["sm_90", "gfx942"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_candidate_fits_and_rounds_as_the_row_does(kernel: Kernel, name: str) -> None:
    target, row = TARGETS[name], choose(kernel, TARGETS[name], HALF)
    tiles = list(reachable(kernel, target))
    assert len(tiles) > 4
    for tile in tiles:
        assert shared_estimate(kernel, tile, target, HALF) <= target.shared_bytes
        assert tile.fused == row.fused
        assert tile.block_m & (tile.block_m - 1) == 0
        if name == "sm_90":
            assert (tile.waves_per_eu, tile.matrix_instr_nonkdim) == (row.waves_per_eu, 16)
