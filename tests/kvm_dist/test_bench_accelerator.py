"""The arithmetic and the refusals of the accelerator bench; its times are nobody's business here."""

from pathlib import Path

import pytest
import torch

from kvm_dist.bench import accelerator
from kvm_dist.bench.accelerator import PEAKS, Measured, Shape, check, full_floor, kvm_floor, measure
from kvm_dist.bench.setting import BUDGETS, FULL_ATTENTION
from kvm_dist.plots.accelerator import accelerator_speed
from models.budget import FixedBudget, PowerLawBudget

CPU = torch.device("cpu")
TINY = Shape(batch=1, heads=2, head_dim=16, chunk=16, dtype=torch.float32)


@pytest.fixture
def tiny_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = {"KVM-256": FixedBudget(slots=16), "KVM 16*sqrt": PowerLawBudget(factor=2, minimum=16)}
    monkeypatch.setattr(accelerator, "BUDGETS", budgets)


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


@pytest.mark.usefixtures("tiny_budgets")
def test_every_phase_and_method_is_measured_at_every_length() -> None:
    rows = list(measure(CPU, TINY, (64, 80), seconds=60))
    assert len(rows) == 2 * 3 * 3
    assert {row.tokens for row in rows} == {64, 80}
    for row in rows:
        full = next(
            r for r in rows if (r.phase, r.tokens, r.method) == (row.phase, row.tokens, FULL_ATTENTION)
        )
        assert row.ratio == full.seconds / row.seconds


@pytest.mark.usefixtures("tiny_budgets")
def test_lengths_that_do_not_fit_into_the_time_are_left_out() -> None:
    assert {row.tokens for row in measure(CPU, TINY, (64, 80, 96), seconds=0)} == {64}


@pytest.mark.usefixtures("tiny_budgets")
def test_correct_results_pass_the_check_and_wrong_ones_stop_the_bench(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert max(check(CPU, TINY, 100).values()) < 1e-6
    right = accelerator._call

    def wrong(*args: object, **kwargs: object) -> object:
        out, state = right(*args, **kwargs)  # type: ignore[arg-type]
        return (out * 1.01 if kwargs.get("backend") == "auto" else out), state

    monkeypatch.setattr(accelerator, "_call", wrong)
    with pytest.raises(ArithmeticError, match="KVM-256 out"):
        check(CPU, TINY, 100)


def test_a_method_without_its_opponent_has_no_ratio() -> None:
    (row,) = accelerator.with_ratios([Measured("decode", "KVM-256", 64, 1.0, None)])
    assert row.ratio is None


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
