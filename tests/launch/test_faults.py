"""Faults that a run meets by itself, at a known step and phase."""

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvm_dist.checkpoint.load import load_checkpoint
from kvm_dist.faults import VARIABLE
from tests.launch.tiny_run import STEPS, TinyRun

Seen = Callable[[str, object], None]  # the fixture `record_property`: what the fault table says was seen


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> TinyRun:
    """One run that meets one fault after the other: each start shows that the one before cost nothing."""
    return TinyRun(tmp_path_factory.mktemp("faulty"), corpus)


def meet(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, faults: str, code: int, *overrides: str
) -> tuple[str, float]:
    """Start the run with `faults`; its output, and the seconds from the last fault to its end."""
    monkeypatch.setenv(VARIABLE, faults)
    output = run.train(overrides, code)
    struck = [path.stat().st_mtime for path in (run.directory / "faults").iterdir()]
    return output, time.time() - max(struck)


def postmortem(run: TinyRun) -> Any:
    return json.loads((run.directory / "postmortem.json").read_text())


def newest(run: TinyRun) -> int:
    found = (run.directory / "checkpoints").glob("step-*/manifest.json")
    return max(int(path.parent.name.removeprefix("step-")) for path in found)


def test_signals_to_ranks_one_step_apart_save_one_step(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, record_property: Seen
) -> None:
    meet(run, monkeypatch, "usr2:0:3,term:1:4", 75)
    assert len(list((run.directory / "faults").iterdir())) == 2, "rank 1 stopped before it was asked"
    assert newest(run) == run.last_step() == 4
    record_property("seen", "exit 75, step 4 saved")


def test_a_rank_that_dies_in_its_backward_ends_the_run_in_seconds(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, record_property: Seen
) -> None:
    output, seconds = meet(run, monkeypatch, "kill:1:8", 70)
    assert "goes on from step-00000004" in output
    assert "rank 1 of 2 was killed by SIGKILL" in output
    found = postmortem(run)
    assert (found["rank"], found["step"], found["phase"], found["signal"]) == (1, 8, "backward", "SIGKILL")
    record_property("seen", f"exit 70, all down {seconds:.1f} s after it")


def test_a_loss_that_is_no_number_on_one_rank_ends_all(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, record_property: Seen
) -> None:
    output, _ = meet(run, monkeypatch, "nan:1:10", 76)
    assert "goes on from step-00000006" in output
    assert "step 10: the loss is nan" in output
    assert newest(run) == 9
    assert postmortem(run)["meaning"] == "not_finite"
    (dropped,) = map(json.loads, (run.directory / "dropped_batches.jsonl").read_text().splitlines())
    first, *_, last = map(int, dropped["sequences"])
    assert dropped["step"] == 10
    assert f"The data of this step: sequences {first}-{last} of the run, cut from documents train-" in output
    assert f"(in full: {run.directory / 'dropped_batches.jsonl'})" in postmortem(run)["cause"]
    record_property("seen", "exit 76, newest checkpoint of the step before")


def test_a_rank_that_never_answers_is_named(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch, record_property: Seen
) -> None:
    output, seconds = meet(run, monkeypatch, "silent:1:11", 71, "parallel.timeout_seconds=10")
    found = postmortem(run)
    assert (found["rank"], found["step"], found["phase"]) == (1, 11, "reduce"), output
    assert len(found["stacks"]) == 2
    assert "_wait_for_ever" in (run.directory / "stacks/rank-00001.txt").read_text()
    record_property("seen", f"exit 71 {seconds:.1f} s after it, with a step timeout of 10 s")


def test_after_all_this_the_run_ends_with_the_bits_of_an_undisturbed_one(
    run: TinyRun, undisturbed: TinyRun
) -> None:
    run.train()
    assert run.final_bytes() == undisturbed.final_bytes()
    assert run.losses() == undisturbed.losses()
    assert [line["step"] for line in run.metrics()] == list(range(1, STEPS + 1))


def test_a_spike_sends_the_run_back_and_a_resume_from_there_has_the_same_bits(
    tmp_path: Path,
    corpus: Path,
    undisturbed: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Seen,
) -> None:
    run = TinyRun(tmp_path, corpus)
    policy = ["train.loss_spike=rollback", "train.loss_spike_window=4", "train.loss_spike_deviations=50"]
    output, _ = meet(run, monkeypatch, "spike:0:11", 0, *policy)
    assert "goes back to step 9" in output
    assert [line["step"] for line in run.metrics()] == list(range(1, STEPS + 1))
    assert run.metrics()[-1]["fault/rollbacks"] == 1
    assert run.metrics()[-1]["fault/skipped_steps"] == 0

    name = "step-00000009"
    back = load_checkpoint(run.directory / "checkpoints" / name)
    golden = load_checkpoint(undisturbed.directory / "checkpoints" / name)
    assert back.state["position"] == golden.state["position"] + 2 * 4, "two batches are left out"
    for parameter in golden.names:
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            assert back.tensor(parameter, kind).equal(golden.tensor(parameter, kind)), parameter

    expected, losses = run.final_bytes(), run.losses()
    assert losses[9] == undisturbed.losses()[9]
    assert losses[10] != undisturbed.losses()[10]
    assert all(math.isfinite(loss) for loss in losses.values())
    shutil.rmtree(run.directory / "checkpoints" / f"step-{STEPS:08d}")
    assert f"goes on from {name}" in run.train(policy)
    assert run.final_bytes() == expected
    assert run.losses() == losses
    record_property("seen", "back from step 11 to 9, on behind the batch of 11")
