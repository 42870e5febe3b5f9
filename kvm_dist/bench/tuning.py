"""Searching for faster tiles: each kernel in turn, one step at a time from its row, as long as time allows.

Nothing here runs in training: what is found is written as rows that all ranks read.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from models.kvm.kernels.candidates import neighbours
from models.kvm.kernels.tuning import Kernel, Shape, Target, Tile, choose

LEAST_GAIN = 0.03  # of a kernel's time: below, two runs differ as much
Report = Callable[[str], None]


class Trials(Protocol):
    """One shape class on one device."""

    target: Target
    shape: Shape

    def default(self) -> Mapping[Kernel, float]:
        """Seconds of each kernel's launches in one step, with the rows as they are."""
        ...

    def run(self, kernel: Kernel, tile: Tile) -> float | None:
        """Seconds of the kernel's launches with this tile; None where it does not run, or is not right."""
        ...


@dataclass(frozen=True)
class Found:
    """A tile that is faster than the row's."""

    kernel: Kernel
    tile: Tile
    seconds: float
    default_seconds: float


@dataclass
class Search:
    """The search on one shape class until `deadline`, by `clock`."""

    trials: Trials
    deadline: float
    report: Report
    clock: Callable[[], float] = time.perf_counter

    def run(self) -> Iterator[Found]:
        """What is found, the kernel that takes most of a step first."""
        before = self.trials.default()
        for kernel in sorted(before, key=lambda one: -before[one]):
            if self._is_over:
                self.report(f"{kernel}: left out, the time is over")
                continue
            found = self._climb(kernel, before[kernel])
            if found is None:
                self.report(f"{kernel}: {1e3 * before[kernel]:.3f} ms, nothing faster")
                continue
            self.report(
                f"{kernel}: {1e3 * before[kernel]:.3f} ms -> {1e3 * found.seconds:.3f} ms, {found.tile}"
            )
            yield found

    @property
    def _is_over(self) -> bool:
        return self.clock() >= self.deadline

    def _climb(self, kernel: Kernel, default_seconds: float) -> Found | None:
        target, shape = self.trials.target, self.trials.shape
        start = choose(kernel, target, shape)
        best, seconds = start, default_seconds
        tried = {start}
        while True:
            from_here, before = best, seconds
            for tile in neighbours(kernel, from_here, target, shape):
                if tile in tried or self._is_over:
                    continue
                tried.add(tile)
                taken = self.trials.run(kernel, tile)
                if taken is not None and taken < seconds:
                    best, seconds = tile, taken
            if seconds > before * (1 - LEAST_GAIN):
                break
        if seconds > default_seconds * (1 - LEAST_GAIN):
            return None
        return Found(kernel, best, seconds, default_seconds)
