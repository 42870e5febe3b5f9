"""Steps of the operator with one kernel's tile changed: first right, then clocked launch by launch."""

import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from kvm_dist.bench.one_layer import Shape, call_kvm, decode_last, make_inputs
from models.budget import SlotBudget
from models.kvm.kernels.launch import current_target, observed_launches, refused_by_compiler
from models.kvm.kernels.tuning import Kernel, Tile, on_trial
from models.kvm.kernels.tuning import Shape as RowShape


class LaunchClock(Protocol):
    """Clocks launches of kernels."""

    def __call__(self, kernel: Kernel, start: Callable[[], None]) -> None:
        """Start one, and clock it."""
        ...

    def seconds(self) -> dict[Kernel, float]:
        """Of all launches since it was last asked, by kernel."""
        ...


class EventClock:
    """By CUDA events; by wall clock where there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[tuple[Kernel, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: dict[Kernel, float] = {}

    def __call__(self, kernel: Kernel, start: Callable[[], None]) -> None:
        if not self._on_gpu:
            begun = time.perf_counter()
            start()
            self._add(kernel, time.perf_counter() - begun)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        start()
        end.record()
        self._events.append((kernel, begin, end))

    def seconds(self) -> dict[Kernel, float]:
        if self._events:
            torch.cuda.synchronize()
        for kernel, begin, end in self._events:
            self._add(kernel, begin.elapsed_time(end) / 1e3)
        found, self._seconds, self._events = self._seconds, {}, []
        return found

    def _add(self, kernel: Kernel, seconds: float) -> None:
        self._seconds[kernel] = self._seconds.get(kernel, 0.0) + seconds


class OperatorTrials:
    """Forward and backward of every budget, and a decoded token."""

    def __init__(
        self,
        device: torch.device,
        shape: Shape,
        tokens: int,
        budgets: Mapping[str, SlotBudget],
        clock: LaunchClock,
        repeats: int = 3,
    ) -> None:
        self.target = current_target(device)
        self.shape = RowShape(shape.head_dim, shape.dtype.itemsize)
        self._layer, self._budgets, self._clock, self._repeats = shape, budgets, clock, repeats
        self._inputs = make_inputs(shape, tokens, device, requires_grad=True)
        self._wanted = self._results()
        # A kernel may sum in another order: halves round differently, and a near tie may route differently.
        self._bound = max(4 * torch.finfo(shape.dtype).eps, 1e-3)

    def default(self) -> dict[Kernel, float]:
        rounds = [self._clocked() for _ in range(self._repeats)]
        return {kernel: median(one[kernel] for one in rounds) for kernel in rounds[0]}

    def run(self, kernel: Kernel, tile: Tile) -> float | None:
        with on_trial(kernel, tile):
            try:
                got = self._results()
            except Exception as error:
                if not refused_by_compiler(error):
                    raise
                return None
            if not self._are_right(got):
                return None
            return median(self._clocked()[kernel] for _ in range(self._repeats))

    def _clocked(self) -> dict[Kernel, float]:
        with observed_launches(self._clock):
            self._results()
        return self._clock.seconds()

    def _results(self) -> list[Tensor]:
        return [tensor for budget in self._budgets.values() for tensor in self._of(budget)]

    def _of(self, budget: SlotBudget) -> Iterator[Tensor]:
        output, _ = call_kvm(self._inputs, budget, self._layer, backend="triton")
        yield output.detach()
        yield from torch.autograd.grad(output, self._inputs, torch.ones_like(output))
        yield decode_last(self._inputs, budget, self._layer, backend="triton")

    def _are_right(self, got: list[Tensor]) -> bool:
        """Close in the mean square: NaN is not."""
        return all(
            float((ours.float() - wanted.float()).norm()) <= self._bound * float(wanted.float().norm())
            for ours, wanted in zip(got, self._wanted, strict=True)
        )
