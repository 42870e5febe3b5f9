"""What the loop does with a batch that is not finite."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from kvm_dist.config import RunConfig
from kvm_dist.counters import Counters
from kvm_dist.data.loader import StepBatch
from kvm_dist.exit_codes import NotFinite
from kvm_dist.rollback import Return
from kvm_dist.step import StepDropped
from kvm_dist.trainer import Trainer


def trainer(bad: set[int], **train: Any) -> tuple[Trainer, list[Counters]]:
    """Steps of one sequence; the batches at positions `bad` are not finite. Also the saves it makes."""
    config = RunConfig.model_validate(
        {"train": {"steps": 4, "batch_sequences": 1, **train}, "evaluation": {"every_steps": 100}}
    )
    saves: list[Counters] = []

    def batches() -> Iterator[StepBatch]:
        for position in range(1, 100):
            yield StepBatch((position,), position, 0)  # type: ignore[arg-type]

    def step(batch: tuple[int], number: int, stop: bool, limit: float | None) -> Any:
        if batch[0] in bad:
            raise StepDropped(f"step {number + 1}: the loss is nan")
        return SimpleNamespace(tokens=1, loss=1.0, stop=False)

    def nothing(*_: object, **__: object) -> dict[str, float]:
        return {}

    def save(counters: Counters, metrics: dict[str, float], last: bool) -> dict[str, float]:
        saves.append(counters)
        return {}

    parts: Any = {
        "evaluation": SimpleNamespace(run=nothing),
        "checkpoints": SimpleNamespace(save=save, settle=nothing, finish=nothing),
        "reporter": SimpleNamespace(
            waiting_for_data=nullcontext, step_metrics=lambda *_: {"train/loss": 1.0}, log=nothing
        ),
        "describe": lambda step, batch, error: f"The data of step {step}: {batch.position}",
        "heartbeat": SimpleNamespace(begin_step=nothing, beat=nothing, metrics=dict),
    }
    loop: Any = step
    return Trainer(config, loop, batches(), should_stop=lambda: False, counters=Counters(), **parts), saves


def test_a_batch_that_is_not_finite_ends_the_run_unless_told_otherwise() -> None:
    loop, _ = trainer({2})
    with pytest.raises(NotFinite, match=r"^step 2: the loss is nan\. The data of step 2: 2$"):
        loop.run()
    assert loop.counters == Counters(step=1, position=1, tokens=1)


def test_skipping_costs_the_batch_and_is_counted_and_saved_at_once() -> None:
    loop, saves = trainer({1, 3}, not_finite="skip")
    assert loop.run() == Counters(step=4, position=6, tokens=4, skipped_steps=2)
    assert saves[0] == Counters(step=1, position=3, tokens=1, skipped_steps=2)
    assert len(saves) == 2, "one after the skipped batch, one at the end"


def test_skips_are_bounded_over_all_attempts() -> None:
    loop, _ = trainer({2, 3, 4}, not_finite="skip", not_finite_allowed=2)
    with pytest.raises(NotFinite, match=r"not_finite_allowed=2 is reached"):
        loop.run()
    assert loop.counters == Counters(step=1, position=3, tokens=1, skipped_steps=2)


def test_a_rollback_goes_on_behind_the_batch_and_is_saved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, saves = trainer({3, 5}, not_finite="rollback", not_finite_allowed=1)
    saved = Counters(step=1, position=1, tokens=1)
    monkeypatch.setattr("kvm_dist.trainer.roll_back", lambda *_: Return(saved, {"train/loss": 2.0}))
    with pytest.raises(NotFinite, match=r"went on without 1 batches before.*not_finite_allowed=1"):
        loop.run()
    assert saves == [Counters(step=1, position=3, tokens=1, rollbacks=1)]
    assert loop.counters == Counters(step=2, position=4, tokens=2, rollbacks=1)


def test_a_rollback_without_a_checkpoint_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = trainer({1}, not_finite="rollback")

    def nothing(*_: object) -> Return:
        raise NotFinite("there is no checkpoint")

    monkeypatch.setattr("kvm_dist.trainer.roll_back", nothing)
    with pytest.raises(NotFinite, match=r"step 1: the loss is nan\..*; there is no checkpoint"):
        loop.run()
