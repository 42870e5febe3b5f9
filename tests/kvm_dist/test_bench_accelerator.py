"""The arithmetic and the refusals of the accelerator bench; its times are nobody's business here."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvm_dist.bench import accelerator, one_layer
from kvm_dist.bench.accelerator import Clock, Measured, goals, measure
from kvm_dist.bench.floors import PEAKS, full_floor, kvm_floor
from kvm_dist.bench.one_layer import Shape, check
from kvm_dist.bench.pace import Pace
from kvm_dist.bench.setting import BUDGETS, FULL_ATTENTION
from kvm_dist.plots.accelerator import accelerator_speed
from models.budget import FixedBudget, PowerLawBudget

CPU = torch.device("cpu")
ONCE = Clock(CPU, repeats=1, most_repeats=1)
TINY = Shape(batch=1, heads=2, head_dim=16, chunk=16, dtype=torch.float32)


@pytest.fixture
def tiny_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = {"KVM-256": FixedBudget(slots=16), "KVM 16*sqrt": PowerLawBudget(factor=2, minimum=16)}
    for module in (accelerator, one_layer):
        monkeypatch.setattr(module, "BUDGETS", budgets)


def test_the_floors_give_the_ceilings_by_arithmetic_at_32k() -> None:
    ceilings = {
        (phase, name): full_floor(phase, 32768, Shape(), PEAKS["H200"])
        / kvm_floor(phase, 32768, budget, Shape(), PEAKS["H200"])
        for phase in ("prefill", "backward")
        for name, budget in BUDGETS.items()
    }
    assert ceilings["prefill", "KVM-256"] == pytest.approx(21.3, abs=0.5)
    assert ceilings["backward", "KVM-256"] == pytest.approx(25.8, abs=0.5)
    assert ceilings["prefill", "KVM 16*sqrt"] == pytest.approx(5.0, abs=0.2)
    assert ceilings["backward", "KVM 16*sqrt"] == pytest.approx(7.1, abs=0.2)


def endless() -> Pace:
    return Pace(float("inf"))


@pytest.mark.usefixtures("tiny_budgets")
def test_every_phase_and_method_is_measured_at_every_length() -> None:
    rows = list(measure(CPU, TINY, (64, 80), endless(), clock=ONCE))
    assert len(rows) == 2 * 3 * 3
    assert {row.tokens for row in rows} == {64, 80}
    for row in rows:
        full = next(
            r for r in rows if (r.phase, r.tokens, r.method) == (row.phase, row.tokens, FULL_ATTENTION)
        )
        assert row.ratio == full.seconds / row.seconds


class Timed(Clock):
    """Every measurement takes what `seconds` says of its number, by a clock that nothing else moves."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        super().__init__(CPU)
        self.time, self.measured, self._seconds = 0.0, 0, seconds

    def median(self, call: Callable[[], object]) -> float:
        self.measured += 1
        self.time += self._seconds(self.measured)
        return 1.0

    def now(self) -> float:
        return self.time


@pytest.mark.usefixtures("tiny_budgets")
def test_what_would_end_after_the_time_is_left_out_and_named() -> None:
    """At 64 tokens full attention takes 10 s, the others 1 s at every length."""
    clock, said = Timed(lambda number: 10.0 if number <= 3 else 1.0), list[str]()
    rows = list(measure(CPU, TINY, (64, 128, 256), Pace(60.0, clock.now), clock, said.append))
    assert [(row.tokens, row.method) for row in rows if row.tokens > 64] == [
        (tokens, method) for tokens in (128, 256) for method in BUDGETS for _ in range(3)
    ]
    assert {row.ratio for row in rows if row.tokens > 64} == {None}
    assert said == [
        f"{tokens} {phase} {FULL_ATTENTION}: the time is over"
        for tokens in (128, 256)
        for phase in ("prefill", "backward", "decode")
    ]


@pytest.mark.usefixtures("tiny_budgets")
def test_nothing_begins_after_the_time() -> None:
    """However wrong what was foretold: here every measurement takes ten times as long as the one before."""
    clock, said = Timed(lambda number: 10.0**number), list[str]()
    rows = list(measure(CPU, TINY, (64, 80), Pace(1000.0, clock.now), clock, said.append))
    assert len(rows) == 3
    assert said[-1] == "80 tokens and more: the time is over"
    assert len(said) == 7
    said.clear()
    assert not list(measure(CPU, TINY, (64, 80), Pace(0.0, clock.now), clock, said.append))
    assert said == ["64 tokens and more: the time is over"]


@pytest.mark.usefixtures("tiny_budgets")
def test_what_was_measured_before_memory_ran_out_is_kept() -> None:
    class Full(Clock):
        calls = 0

        def median(self, call: Callable[[], object]) -> float:
            self.calls += 1
            if self.calls == 11:
                raise torch.OutOfMemoryError
            return 1.0

    said: list[str] = []
    rows = list(measure(CPU, TINY, (64, 80, 96), endless(), clock=Full(CPU), left_out=said.append))
    assert [row.tokens for row in rows] == [64] * 9 + [80]
    assert said == ["80 tokens do not fit into memory after 1 measurements"]


def test_a_clock_does_not_count_the_call_that_warms_up() -> None:
    clock = Clock(CPU, repeats=5)
    lasted = iter([2.0, 1.0, 1.0, 9.0])
    clock._once = lambda call: next(lasted)  # type: ignore[method-assign]
    called: list[None] = []
    assert clock.median(lambda: called.append(None)) == 1.0
    assert len(called) == 1
    assert next(lasted) == 9.0


def test_an_h200_is_held_to_its_goals_at_32k_alone() -> None:
    rows = [
        Measured(phase, "KVM-256", 32_768, 1.0, None, ratio)
        for phase, ratio in (("prefill", 9.5), ("decode", 2.0), (accelerator.REPLAYED, 12.0))
    ]
    found = {goal.name: goal for goal in goals([*rows, replace(rows[0], tokens=1024)], "NVIDIA H200")}
    assert [goal.met for goal in found.values()] == [True, False]
    assert found["KVM-256: decode, times faster at 32K"].got == 12.0
    assert not list(goals(rows, "AMD Instinct MI325X"))


@pytest.mark.usefixtures("tiny_budgets")
def test_correct_results_pass_the_check_and_wrong_ones_stop_the_bench(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert max(check(CPU, TINY, 100).values()) < 1e-6
    right = one_layer.call_kvm

    def wrong(*args: object, **kwargs: object) -> object:
        out, state = right(*args, **kwargs)  # type: ignore[arg-type]
        return (out * factor if kwargs.get("state") is not None else out), state

    monkeypatch.setattr(one_layer, "call_kvm", wrong)
    for factor in (1.01, float("nan")):  # noqa: B007, `wrong` uses it
        with pytest.raises(ArithmeticError, match="KVM-256 decoded"):
            check(CPU, TINY, 100)


@pytest.mark.usefixtures("tiny_budgets")
def test_the_picture_has_a_panel_for_every_phase(tmp_path: Path) -> None:
    rows = [
        Measured(phase, method, tokens, tokens / 1e6, tokens / 1e7, 1.0)
        for phase in ("prefill", "backward", "decode")
        for method in (*BUDGETS, FULL_ATTENTION)
        for tokens in (1024, 2048)
    ]
    picture = accelerator_speed(rows, "a GPU", tmp_path / "speed.png")
    assert picture.read_bytes()[:4] == b"\x89PNG"
