"""A run that is killed or stopped goes on exactly where it was, by the same command."""

import shutil
from pathlib import Path

import pytest

from tests.launch.tiny_run import SIGKILL, SIGTERM, SIGUSR2, STEPS, TinyRun


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("target", ["rank 0", "rank 1", "launcher"])
def test_a_killed_run_goes_on_to_the_same_bits(
    target: str, tmp_path: Path, corpus: Path, undisturbed: TinyRun
) -> None:
    run = TinyRun(tmp_path, corpus)
    code, output = run.signal_at(5, SIGKILL, target)
    if target == "launcher":
        assert code == -SIGKILL
    else:
        assert code == 70, output
        assert f"{target} of 2 was killed by SIGKILL" in output
    output = run.train()
    assert "goes on from step-" in output
    assert run.final_bytes() == undisturbed.final_bytes()
    assert run.losses() == undisturbed.losses()
    assert [line["step"] for line in run.metrics()] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("number", "target"), [(SIGTERM, "launcher"), (SIGUSR2, "rank 1")], ids=["launcher", "rank"]
)
def test_a_stop_request_loses_no_step(
    number: int, target: str, tmp_path: Path, corpus: Path, undisturbed: TinyRun
) -> None:
    run = TinyRun(tmp_path, corpus)
    code, output = run.signal_at(4, number, target)
    assert code == 75, output
    last = run.last_step()
    assert (run.directory / "checkpoints" / f"step-{last:08d}" / "manifest.json").exists()
    assert f"goes on from step-{last:08d}" in run.train()
    assert run.final_bytes() == undisturbed.final_bytes()


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a compiler nor any other program, and no Triton."""
    for package in ("triton", "fla"):
        (tmp_path / "packages" / package).mkdir(parents=True)
        (tmp_path / "packages" / package / "__init__.py").write_text(
            "raise ImportError('not on this machine')"
        )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))


@pytest.mark.usefixtures("bare_machine")
@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.sequence=1"],
        ["parallel.sequence=1", "parallel.data=2", "parallel.zero_stage=3"],
        ["parallel.sequence=4", "parallel.zero_stage=0", "train.accumulation=2"],
    ],
    ids=["one rank", "two data ranks", "four sequence ranks"],
)
def test_another_layout_goes_on_with_the_same_loss(
    layout: list[str], tmp_path: Path, undisturbed: TinyRun
) -> None:
    run = TinyRun(tmp_path, tmp_path)  # its config file is not used
    shutil.copytree(undisturbed.directory, run.directory)
    shutil.rmtree(run.directory / "checkpoints" / f"step-{STEPS:08d}")
    run.config = undisturbed.config
    output = run.train([f"run_root={tmp_path}/runs", *layout])
    resumed = STEPS - 3
    assert f"goes on from step-{resumed:08d}" in output
    assert run.losses()[resumed + 1] == pytest.approx(undisturbed.losses()[resumed + 1], rel=1e-6)


def test_a_loss_that_is_not_finite_stops_all_ranks_with_nothing_lost(tmp_path: Path, corpus: Path) -> None:
    run = TinyRun(tmp_path, corpus)
    output = run.train(["optimizer.learning_rate=1e18", "schedule.warmup_steps=0"], code=76)
    assert "optimizer.learning_rate" in output
    assert not list((run.directory / "checkpoints").glob("step-0*/manifest.json"))


def test_a_damaged_checkpoint_is_passed_over_and_only_damaged_ones_end_the_run(
    tmp_path: Path, undisturbed: TinyRun
) -> None:
    run = TinyRun(tmp_path, tmp_path)  # its config file is not used
    shutil.copytree(undisturbed.directory, run.directory)
    run.config = undisturbed.config
    newest, older = (run.directory / "checkpoints" / f"step-{step:08d}" for step in (STEPS, STEPS - 3))
    flip_a_bit(newest / "model.safetensors")
    output = run.train([f"run_root={tmp_path}/runs"])
    assert "model.safetensors" in output
    assert f"goes on from {older.name}" in output
    assert run.final_bytes() == undisturbed.final_bytes()
    for folder in (newest, older):
        flip_a_bit(folder / "optimizer.safetensors")
    assert "none of the 2 checkpoints" in run.train([f"run_root={tmp_path}/runs"], code=74)


def test_a_damaged_shard_ends_the_run_and_is_named(tmp_path: Path, corpus: Path) -> None:
    run = TinyRun(tmp_path, corpus)
    shutil.copytree(corpus / "text", tmp_path / "text")
    data = [f"data.path={tmp_path}/data", f"data.source={tmp_path}/text"]
    run.train([*data, "train.steps=1"])
    shard = next((tmp_path / "data").glob("train-*.tar"))
    flip_a_bit(shard)
    output = run.train([*data, "name=second"], code=65)
    assert shard.name in output


def test_a_killed_and_resumed_run_is_one_run_in_mlflow(tmp_path: Path, corpus: Path) -> None:
    from mlflow import MlflowClient

    run = TinyRun(tmp_path, corpus)
    tracked = ["tracking.enabled=true"]
    code, output = run.signal_at(5, SIGKILL, "rank 0", tracked)
    assert code == 70, output
    run.train(tracked)
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (found,) = client.search_runs(experiments)
    assert found.info.run_id == (run.directory / "mlflow_run_id").read_text().strip()
    assert found.info.status == "FINISHED"
    assert found.data.tags["engine.wrapper"] == "DeepSpeedZeroOptimizer"
    assert found.data.tags["engine.accumulation"] == "float32"
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [point.step for point in history] == list(range(1, STEPS + 1))
    assert {point.step: point.value for point in history} == run.losses()
    assert not any(Path(name).exists() for name in ("mlruns", "mlflow.db")), (
        "a store where nobody asked for one"
    )


def test_other_data_under_a_run_is_refused(tmp_path: Path, undisturbed: TinyRun) -> None:
    (tmp_path / "other").mkdir()
    for number in range(3):
        (tmp_path / "other" / f"{number}.txt").write_text(f"other text {number} " * 300)
    output = undisturbed.train([f"data.path={tmp_path}/data", f"data.source={tmp_path}/other"], code=65)
    assert "digest" in output


def test_a_finished_run_is_finished(undisturbed: TinyRun) -> None:
    before = undisturbed.final_bytes()
    undisturbed.train()
    assert undisturbed.final_bytes() == before


def test_what_a_run_leaves_behind(undisturbed: TinyRun) -> None:
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "samples.jsonl",
        "position_loss.json",
        "logs/rank-00001.log",
    ):
        assert (undisturbed.directory / name).stat().st_size > 0, name
    validated = [line for line in undisturbed.metrics() if "validation/loss" in line]
    assert [line["step"] for line in validated] == [6, 12]
    assert len(list((undisturbed.directory / "plots").glob("*.png"))) >= 2
    kept = sorted(path.name for path in (undisturbed.directory / "checkpoints").iterdir())
    assert kept == ["step-00000009", "step-00000012"]
