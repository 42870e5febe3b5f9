"""A miniature campaign: its runs, how it goes on, and what it makes of trained models."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvm_dist.attempts import ATTEMPTS_NAME
from kvm_dist.exit_codes import ConfigError, CrashError
from kvm_dist.load import dump_config
from kvm_dist.metrics import append_line
from kvm_dist.miniature.grid import ABLATIONS, FAMILIES, CampaignSize, Grid, Trial, full_grid, quick_grid
from kvm_dist.miniature.measure import measure_all
from launch import miniature_runs
from launch.miniature_command import write_data
from launch.miniature_runs import Pace, TrainingRun, train_all, training_runs
from models.backbone import Backbone
from models.initialise import initialise
from tests.kvm_dist.checkpoint_samples import save_tensors


def tiny(out: Path, *trials: Trial) -> Grid:
    return replace(quick_grid(out), trials=trials, loads={128: (4, 8)})


def finish(run: TrainingRun) -> None:
    """As if it had been trained: its configuration and a checkpoint of its last step."""
    config = run.config
    model = Backbone(config.model)
    initialise(model, config.seed)
    run.config.run_directory.mkdir(parents=True)
    (config.run_directory / "config.yaml").write_text(dump_config(config))
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    folder = config.run_directory / "checkpoints"
    save_tensors(folder, config.train.steps, tensors, config_text=dump_config(config))


def test_the_whole_campaign_is_three_seeds_of_recall_and_a_text_run_of_a_family_and_one_of_an_ablation(
    tmp_path: Path,
) -> None:
    runs = training_runs(full_grid(tmp_path))
    assert {(run.trial.task, run.trial.model, run.trial.seed) for run in runs} == {
        *(("recall", model, seed) for model in FAMILIES for seed in range(3)),
        *(("text", model, 0) for model in FAMILIES),
        *(("recall", model, 0) for model in ABLATIONS),
    }
    assert len({run.config.run_directory for run in runs}) == len(runs)
    for task in ("recall", "text"):
        configs = [run.config for run in runs if run.trial.task == task]
        assert len({c.train.model_dump_json() for c in configs}) == 1
        assert len({c.optimizer.model_dump_json() for c in configs}) == 1
        assert len({c.data.model_dump_json() for c in configs}) == 1


def test_all_models_have_as_many_parameters_within_five_percent(tmp_path: Path) -> None:
    counts = {}
    for run in training_runs(full_grid(tmp_path)):
        counts[run.trial.model] = sum(p.numel() for p in Backbone(run.config.model).parameters())
    assert max(counts.values()) < 1.05 * min(counts.values()), counts


def test_the_training_sequences_last_for_one_pass(tmp_path: Path) -> None:
    grid = full_grid(tmp_path)
    run = next(run for run in training_runs(grid) if run.trial.task == "recall")
    train = run.config.train
    assert 0.9 * grid.training_sequences >= train.steps * train.batch_sequences
    assert run.config.data.sequence_length == next(iter(grid.loads))


def test_a_campaign_of_other_steps_and_seeds_gets_data_of_its_own(tmp_path: Path) -> None:
    usual = full_grid(tmp_path, ["kvm-sqrt", "no-sink"])
    grid = full_grid(tmp_path, ["kvm-sqrt", "no-sink"], CampaignSize(50, 60, seeds=1, ablation_seeds=2))
    configs = {run.trial.name: run.config for run in training_runs(grid)}
    assert {name: config.train.steps for name, config in configs.items()} == {
        "recall-kvm-sqrt-seed0": 50,
        "recall-no-sink-seed0": 50,
        "recall-no-sink-seed1": 50,
        "text-kvm-sqrt-seed0": 60,
    }
    assert grid.recall_documents != usual.recall_documents
    assert usual.training_sequences > grid.training_sequences > 50 * 8


def test_an_unknown_model_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kvm-cube: no such model; there are full-attention, kvm-sqrt"):
        full_grid(tmp_path, ["kvm-cube"])
    assert full_grid(tmp_path, ["bswa", "kvm-sqrt"]).models("recall") == ("kvm-sqrt", "bswa")
    for grid in (full_grid(tmp_path, ["no-sink"]), quick_grid(tmp_path, ["no-sink"])):
        assert grid.models("recall") == ("kvm-sqrt", "no-sink")  # what it is compared with is there, too
        assert grid.models("text") == ("kvm-sqrt",)


def test_a_run_is_trained_by_the_train_command_once(tmp_path: Path) -> None:
    grid = tiny(tmp_path, Trial("recall", "kvm-sqrt", 1))
    (run,) = training_runs(grid)
    write_data(grid, run.config.data.sequence_length)
    said: list[tuple[str, float]] = []
    train_all([run], 2, lambda what, share: said.append((what, share)))
    assert said == [("1 of 1 runs to train, 2 at a time", 0.0), ("recall-kvm-sqrt-seed1 is trained", 1.0)]
    assert run.is_trained
    before = run.log.read_bytes()
    train_all([run], 2, lambda what, share: said.append((what, share)))
    assert (len(said), run.log.read_bytes()) == (2, before)
    measure_all(grid, 1, lambda trial, share: None)
    result = json.loads(grid.result_path(run.trial).read_bytes())
    assert (result["step"], result["seed"]) == (run.config.train.steps, 1)
    asked = {(cell["tokens"], cell["pairs"]): 0 for cell in result["recall"]}
    for cell in result["recall"]:
        asked[cell["tokens"], cell["pairs"]] += cell["asked"]
    assert asked == {(128, pairs): pairs * grid.evaluation_sequences for pairs in (4, 8)}


def test_a_failed_run_is_named_with_the_end_of_its_log_and_nothing_starts_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def command(run: TrainingRun) -> list[str]:
        started.append(run.trial.model)
        return [sys.executable, "-c", "print('out of paper'); raise SystemExit(74)"]

    monkeypatch.setattr(miniature_runs, "_command", command)
    grid = tiny(tmp_path, Trial("recall", "bswa", 0), Trial("recall", "rwkv7", 0))
    with pytest.raises(CrashError, match=r"(?s)recall-bswa-seed0 ended with exit code 74.*out of paper"):
        train_all(training_runs(grid), 1, lambda what, share: None)
    assert started == ["bswa"]


def test_a_run_that_diverges_is_told_and_the_others_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(run: TrainingRun) -> list[str]:
        return [sys.executable, "-c", f"raise SystemExit({76 if run.trial.model == 'bswa' else 0})"]

    monkeypatch.setattr(miniature_runs, "_command", command)
    grid = tiny(tmp_path, Trial("recall", "bswa", 0), Trial("recall", "rwkv7", 0))
    said: list[str] = []
    diverged = train_all(training_runs(grid), 2, lambda what, share: said.append(what.split(";")[0]))
    assert [run.trial.model for run in diverged] == ["bswa"]
    assert sorted(said[1:]) == ["recall-bswa-seed0 diverged", "recall-rwkv7-seed0 is trained"]


def test_the_time_left_is_that_of_the_same_model_and_of_the_mean_model_where_none_was_seen(
    tmp_path: Path,
) -> None:
    trials = [Trial("recall", "bswa", 0), Trial("recall", "rwkv7", 0), Trial("recall", "bswa", 1)]
    bswa, rwkv7, again = training_runs(tiny(tmp_path, *trials))
    pace = Pace([])
    assert pace.left([again], 2) == ""
    for run, seconds in ((bswa, 100.0), (rwkv7, 300.0)):
        start = {"number": 1, "started": 5.0, "host": "here", "pid": 1, "checkpoint": 0}
        run.config.run_directory.mkdir(parents=True)
        append_line(run.config.run_directory / ATTEMPTS_NAME, start)
        append_line(
            run.config.run_directory / ATTEMPTS_NAME, {"number": 1, "code": 0, "ended": 5.0 + seconds}
        )
        pace.add(run)
    (unseen,) = training_runs(tiny(tmp_path, Trial("recall", "kvm-sqrt", 0)))
    assert pace.left([again], 2) == "; about 1:40 min of training left"
    assert pace.left([again, unseen, again], 2) == "; about 3:20 min of training left"
    assert pace.left([], 2) == ""


def test_trained_runs_are_left_alone_and_evaluated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(miniature_runs, "_command", lambda run: pytest.fail("nothing is left to train"))
    grid = tiny(tmp_path, Trial("recall", "bswa", 0), Trial("recall", "full-attention", 0))
    runs = training_runs(grid)
    for run in runs:
        finish(run)
    train_all(runs, 2, lambda what, share: None)
    measured: list[str] = []
    for _ in range(2):
        measure_all(grid, 1, lambda trial, share: measured.append(trial.model))
    assert measured == ["bswa", "full-attention"]
