"""Tracking with MLflow itself: a sqlite store, a real server on loopback, and servers that do not answer."""

import contextlib
import http.server
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from kvm_dist.config import RunConfig, TrackingConfig
from kvm_dist.metrics import read_metrics
from kvm_dist.tracking import NullTracker, Tracker
from kvm_dist.tracking.forwarder import read_state

PATIENCE_SECONDS = 120.0
SECRET = "planted-hush-hush"


@pytest.fixture(autouse=True)
def at_full_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy test machine would starve a process that stands back."""
    monkeypatch.setenv("KVM_DIST_TRACKING_NICENESS", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Making the schema takes seconds: it is made once and copied."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments(max_results=1)
    return path


@pytest.fixture
def database(empty_database: Path, tmp_path: Path) -> str:
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_database, tmp_path / "runs/mlflow.db")
    return f"sqlite:///{tmp_path}/runs/mlflow.db"


@contextlib.contextmanager
def mlflow_server(uri: str, port: int, folder: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1"]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with subprocess.Popen(
        command,
        cwd=folder,  # it keeps artifacts there
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as server:
        try:
            yield
        finally:
            os.killpg(server.pid, signal.SIGKILL)


@contextlib.contextmanager
def trainer(tmp_path: Path, uri: str, first: int, last: int, status: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.kvm_dist.tracking_trainer", str(tmp_path / "runs"), uri]
    command += [str(first), str(last), status]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        if process.poll() is None:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tracked_run(tmp_path: Path, client: MlflowClient) -> Run:
    return client.get_run((tmp_path / "runs/sample/mlflow_run_id").read_text().strip())


def has_status(tmp_path: Path, client: MlflowClient, status: str) -> bool:
    path = tmp_path / "runs/sample/mlflow_run_id"
    return path.exists() and tracked_run(tmp_path, client).info.status == status


def sent_steps(client: MlflowClient, run: Run, key: str = "train/loss") -> list[int]:
    return sorted(metric.step for metric in client.get_metric_history(run.info.run_id, key))


def test_a_killed_trainer_leaves_no_running_run_and_a_resume_reuses_it(tmp_path: Path, database: str) -> None:
    client = MlflowClient(database)
    with trainer(tmp_path, database, 1, 10, "wait") as process:
        assert said(process) == "logged"
        wait_for(lambda: has_status(tmp_path, client, "RUNNING"))
        process.kill()
        wait_for(lambda: has_status(tmp_path, client, "KILLED"))
    killed = tracked_run(tmp_path, client)
    assert sent_steps(client, killed) == list(range(1, 11))

    with trainer(tmp_path, database, 6, 20, "FINISHED") as process:
        assert [said(process), said(process)] == ["logged", "True"]
    finished = tracked_run(tmp_path, client)
    assert (finished.info.run_id, finished.info.status) == (killed.info.run_id, "FINISHED")
    assert sent_steps(client, finished) == sent_steps(client, finished, "train/tokens") == list(range(1, 21))
    assert finished.data.params["train.steps"] == "6000"
    assert finished.data.tags["mlflow.source.git.commit"]
    assert [file.path for file in client.list_artifacts(finished.info.run_id)] == ["config.yaml"]
    assert len(client.search_runs([finished.info.experiment_id])) == 1
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


def test_a_server_that_comes_late_gets_everything_once(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    with trainer(tmp_path, uri, 1, 30, "FAILED") as process:
        assert said(process) == "logged"
        wait_for(lambda: bool(read_state(tmp_path / "runs/sample").get("problem")))
        with mlflow_server(database, port, tmp_path):
            assert said(process) == "True"
    client = MlflowClient(database)
    run = tracked_run(tmp_path, client)
    assert run.info.status == "FAILED"
    assert sent_steps(client, run) == list(range(1, 31))
    for path in (tmp_path / "runs/sample").rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


class Answer500(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(500)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def server_that(behaviour: str) -> Iterator[int]:
    if behaviour == "hangs":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield listener.getsockname()[1]
        return
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer500) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize("behaviour", ["hangs", "answers 500"])
def test_a_server_that_does_not_work_costs_a_bounded_wait_at_the_end(tmp_path: Path, behaviour: str) -> None:
    with server_that(behaviour) as port:
        tracking = TrackingConfig(uri=f"http://127.0.0.1:{port}")
        config = RunConfig(run_root=tmp_path, name="sample", tracking=tracking)
        config.run_directory.mkdir()
        tracker = Tracker(config.run_directory, config, drain_seconds=1)
        tracker.log(1, {"train/loss": 1.0})
        wait_for(lambda: bool(read_state(config.run_directory).get("problem")))
        assert tracker.close(wait_seconds=0.1) is False
    assert [values["step"] for values in read_metrics(config.run_directory / "metrics.jsonl")] == [1]
    assert tracker._process is not None
    tracker._process.kill()
    tracker._process.wait()


def test_without_tracking_there_are_metrics_and_no_process(tmp_path: Path) -> None:
    config = RunConfig(run_root=tmp_path, name="sample", tracking=TrackingConfig(enabled=False))
    config.run_directory.mkdir()
    tracker = Tracker(config.run_directory, config)
    tracker.log(1, {"train/loss": 1.0})
    tracker.artifact(tmp_path / "x.png")
    assert tracker.close()
    assert [path.name for path in config.run_directory.iterdir()] == ["metrics.jsonl"]


def test_ranks_without_a_tracker_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = NullTracker()
    tracker.log(1, {"train/loss": 1.0})
    tracker.checkpoint(tmp_path, 1)
    tracker.artifact(tmp_path / "x.png")
    assert tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_vanishes_does_not_stop_the_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RunConfig(run_root=tmp_path, name="absent", tracking=TrackingConfig(enabled=False))
    tracker = Tracker(config.run_directory, config)
    for step in (1, 2):
        tracker.log(step, {"train/loss": 1.0})
    tracker.checkpoint(tmp_path / "no such checkpoint", 1)
    assert "may be missing" in caplog.text


def test_a_killed_tracking_process_is_back_at_the_next_checkpoint(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(tracker: Tracker) -> None:
        tracker._process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        started.append(tracker._process)

    monkeypatch.setattr(Tracker, "_start_process", start)
    checkpoint = tmp_path / "step-00000001"
    checkpoint.mkdir()
    tracker = Tracker(tmp_path, RunConfig(run_root=tmp_path, tracking=TrackingConfig(uri=database)))
    for alive in (True, False):
        if not alive:
            started[0].kill()
            started[0].wait()
        tracker.checkpoint(checkpoint, 1, digest="0")
        assert len(started) == (1 if alive else 2)
    started[1].kill()
