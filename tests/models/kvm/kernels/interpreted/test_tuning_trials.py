"""Trying tiles of the kernels with the operator itself, clocked by a clock that makes times up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from kvm_dist.bench import tuning_trials
from kvm_dist.bench.one_layer import Shape, call_kvm
from kvm_dist.bench.tuning_trials import OperatorTrials
from launch.tuning_bench import search
from models.budget import FixedBudget
from models.kvm.kernels import tuning
from models.kvm.kernels.measured import read_rows
from models.kvm.kernels.tuning import Kernel, Tile

LAYER = Shape(batch=1, heads=1, head_dim=16, chunk=8, dtype=torch.float32)
ROW = tuning.choose("read", tuning.TARGETS["interpreter"], tuning.Shape(16, 4))
FAST, WRONG, TOO_LARGE = Tile(16, 32), Tile(32, 16), Tile(16, 16, warps=8)


class MadeUp:
    """A second a launch, half of it with the fast tile, a tenth with those that must not be taken."""

    def __init__(self) -> None:
        self.found: dict[Kernel, float] = {}

    def __call__(self, kernel: Kernel, start: Callable[[], None]) -> None:
        start()
        _, tile = tuning._on_trial[-1] if tuning._on_trial else (kernel, ROW)
        factor = {FAST: 0.5, WRONG: 0.1, TOO_LARGE: 0.1}.get(tile, 1.0)
        self.found[kernel] = self.found.get(kernel, 0.0) + factor

    def seconds(self) -> dict[Kernel, float]:
        found, self.found = self.found, {}
        return found


def faulty(inputs: list[Tensor], *arguments: Any, **more: Any) -> Any:
    trial = tuning._on_trial[-1] if tuning._on_trial else None
    if trial and trial[1] == TOO_LARGE:
        raise OutOfResources(2, 1, "shared memory")
    output, state = call_kvm(inputs, *arguments, **more)
    return (output * 1.01 if trial and trial[1] == WRONG else output), state


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> OperatorTrials:
    monkeypatch.setattr(tuning_trials, "call_kvm", faulty)
    budgets = {"fixed": FixedBudget(slots=8)}
    return OperatorTrials(torch.device("cpu"), LAYER, 26, budgets, MadeUp(), repeats=1)


def test_a_tile_is_clocked_if_it_runs_and_is_right(trials: OperatorTrials) -> None:
    default = trials.default()
    assert set(default) == {"prepare_keys", "rows", "route", "fold", "decode"} | {
        kernel for kernel in tuning.KERNELS if kernel.startswith("read")
    }
    assert trials.run("read", FAST) == default["read"] / 2
    assert trials.run("read", WRONG) is None
    assert trials.run("read", TOO_LARGE) is None


def test_an_error_of_the_kernels_is_not_taken_for_a_tile_that_does_not_fit(
    trials: OperatorTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(tuning_trials, "call_kvm", breaks)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        trials.run("read", FAST)


def test_what_is_faster_is_written_as_a_row(
    trials: OperatorTrials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "default", lambda: {"read": 2.0})
    monkeypatch.setattr("kvm_dist.bench.tuning.neighbours", lambda *_: [FAST, WRONG, TOO_LARGE])
    path = tmp_path / "interpreter.json"
    rows = search(trials, deadline=float("inf"), path=path, device_name="none")
    assert read_rows(path) == rows
    (one,) = rows
    assert (one.row.kernel, one.row.chips, one.row.tile) == ("read", "interpreter", FAST)
    assert (one.row.widest, one.row.element_bytes) == (16, 4)
    assert one.seconds < one.default_seconds == 2.0
