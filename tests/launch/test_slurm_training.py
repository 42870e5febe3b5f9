"""Training on a real Slurm of two nodes: whatever happens, it ends with the bits of an undisturbed run."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvm_dist.attempts import read_attempts
from kvm_dist.faults import VARIABLE
from kvm_dist.tracking.forwarder import read_state
from tests.launch.slurm_run import SlurmRun, rank_pids, slurm
from tests.launch.tiny_run import SIGKILL, STEPS, TinyRun
from tests.support import slurm_cluster
from tests.support.mlflow_server import MlflowServer
from tests.support.planted import SECRETS, files_with_secrets

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing()),
    pytest.mark.timeout(1800),
]
Seen = Callable[[str, object], None]  # the fixture `record_property`: what the fault table says was seen


@pytest.fixture
def run(tmp_path: Path, corpus: Path) -> Iterator[SlurmRun]:
    run = SlurmRun(tmp_path, corpus)
    yield run
    run.cancel()
    for node in slurm_cluster.NODES:
        slurm_cluster.start_node(node)
        run.wait_for_node(node)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MlflowServer]:
    (tmp_path / "server").mkdir()
    server = MlflowServer(tmp_path / "server")
    server.start()
    yield server
    server.kill()


def test_a_run_on_two_nodes_comes_through_everything_at_once(
    run: SlurmRun,
    undisturbed: TinyRun,
    server: MlflowServer,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Seen,
) -> None:
    # Slow: the first start while the store gets its first values, the third until its node goes.
    environment = SECRETS | {VARIABLE: "slow:0:3,slow:1:9", "KVM_DIST_TRACKING_NICENESS": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run.wait("MLflow server", server.answers)
    run.submit(f"tracking.uri={server.uri}", "tracking.enabled=true")
    run.wait("first values", lambda: bool(read_state(run.directory).get("last_step")) or run.reached() > 5)
    slurm("scancel", "--signal=USR2", run.job)
    run.start_again_now()
    saved = run.last_step()
    assert (run.directory / "checkpoints" / f"step-{saved:08d}" / "manifest.json").exists()

    run.wait_for_step(max(saved + 1, 5))
    server.kill()
    for pid in rank_pids(1, run.directory):
        os.kill(pid, SIGKILL)
    run.start_again_now()
    assert "rank 1 of 2 on node2: Killed" in run.output()

    run.wait_for_step(8)
    run.lose_node("node2")
    server.start()
    run.wait_for_end(start_again=True)

    codes = [attempt.code for attempt in read_attempts(run.directory)]
    assert codes[:2] == [75, 70], run.output()
    assert codes[-1] == 0, run.output()
    assert run.final_bytes() == undisturbed.final_bytes()
    assert run.losses() == undisturbed.losses()
    assert [line["step"] for line in run.metrics()] == list(range(1, STEPS + 1))
    assert_tracked_once(server.database)
    assert files_with_secrets(run.directory) == []
    record_property("seen", f"ends of its starts: {codes}; {STEPS} steps, each once")


def assert_tracked_once(database: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(database)
    (found,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    for key in ("train/loss", "train/tokens", "fault/restarts"):
        history = client.get_metric_history(found.info.run_id, key)
        assert [point.step for point in history] == list(range(1, STEPS + 1)), key
    assert found.info.status == "FINISHED"


def test_a_time_limit_costs_no_step(
    run: SlurmRun, undisturbed: TinyRun, monkeypatch: pytest.MonkeyPatch, record_property: Seen
) -> None:
    """Steps of five seconds. Slurm looks every half minute whether to warn: here 15 to 45 s after a start."""
    monkeypatch.setenv(VARIABLE, "slow:0:2")
    run.submit("slurm.time_minutes=2", "slurm.signal_seconds=75")
    run.wait_for_end(start_again=True)
    codes = [attempt.code for attempt in read_attempts(run.directory)]
    assert set(codes[:-1]) == {75}, run.output()
    assert codes[-1] == 0, run.output()
    assert "stopped after step" in run.output()
    assert run.final_bytes() == undisturbed.final_bytes()
    record_property("seen", f"ends of its starts: {codes}")


def test_a_sweep_is_one_array_under_one_parent_run(run: SlurmRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("KVM_DIST_TRACKING_NICENESS", "0")  # a busy machine would starve it
    small = ["slurm.nodes=1", "parallel.sequence=1", "train.steps=2", "evaluation.validation_sequences=0"]
    run.submit("optimizer.learning_rate=1e-3,2e-3", "tracking.enabled=true", *small)
    run.wait_for_end()
    members = sorted(path.parent for path in run.directory.glob("*/metrics.jsonl"))
    assert [path.name for path in members] == ["000-learning_rate-1e-3", "001-learning_rate-2e-3"]
    assert [[a.code for a in read_attempts(path)] for path in members] == [[0], [0]], run.output()

    client = MlflowClient(f"sqlite:///{run.root}/runs/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    (parent,) = [found for found in runs if "mlflow.parentRunId" not in found.data.tags]
    children = [found for found in runs if found is not parent]
    assert {found.data.tags["mlflow.parentRunId"] for found in children} == {parent.info.run_id}
    assert sorted(found.data.params["optimizer.learning_rate"] for found in children) == ["0.001", "0.002"]
    assert {found.info.status for found in runs} == {"FINISHED"}
