"""Tracking with MLflow itself: a sqlite store, a real server on loopback, and servers that do not answer."""

import contextlib
import hashlib
import http.server
import importlib.util
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

from kvm_dist.config import DataConfig, RunConfig, TrackingConfig
from kvm_dist.data.first_use import ensure_prepared
from kvm_dist.metrics import append_metrics, read_metrics, truncate_after
from kvm_dist.tracking import NullTracker, Tracker
from kvm_dist.tracking.description import description
from kvm_dist.tracking.events import Kind, append_event
from kvm_dist.tracking.forwarder import Forwarder, read_state
from kvm_dist.tracking.lock import alone_in
from kvm_dist.tracking.store import MlflowStore
from kvm_dist.tracking.sweep import declare_sweep

PATIENCE_SECONDS = 300.0
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
def mlflow_server(uri: str, port: int, folder: Path, *options: str) -> Iterator[None]:
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--workers", "1", *options]
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
def trainer(
    tmp_path: Path, uri: str, first: int, last: int, status: str, pause: int = 0, back: int = 0
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.kvm_dist.tracking_trainer", str(tmp_path / "runs"), uri]
    command += [str(first), str(last), status, str(pause), str(back)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
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
    files = [file.path for file in client.list_artifacts(finished.info.run_id)]
    assert files == ["checkpoints", "config.yaml"]
    models = client.search_logged_models([finished.info.experiment_id])
    assert sorted(model.name for model in models) == [f"step-{step:08d}" for step in (5, 10, 15, 20)]
    assert sorted(output.step for output in finished.outputs.model_outputs) == [5, 10, 15, 20]
    assert sent_steps(client, finished, "validation/loss") == [5, 10, 15, 20]
    assert sent_steps(client, finished, "system/node1/cpu_utilization_percentage") == [1, 2]
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


@pytest.fixture
def server_with_logins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of `mlflow server --app-name basic-auth`, whose only user is that of the environment."""
    folder = tmp_path / "server"
    folder.mkdir()
    settings = {
        "database_uri": f"sqlite:///{folder}/users.db",
        "admin_username": "me",
        "default_permission": "NO_PERMISSIONS",
        "authorization_function": "mlflow.server.auth:authenticate_request_basic_auth",
    }
    lines = [f"{name} = {value}\n" for name, value in settings.items()]
    (folder / "basic_auth.ini").write_text("".join(["[mlflow]\n", *lines]))
    monkeypatch.setenv("MLFLOW_AUTH_CONFIG_PATH", str(folder / "basic_auth.ini"))
    monkeypatch.setenv("MLFLOW_AUTH_ADMIN_PASSWORD", SECRET)
    monkeypatch.setenv("MLFLOW_FLASK_SERVER_SECRET_KEY", SECRET)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    if importlib.util.find_spec("flask_wtf") is None:  # it guards a page of the server only
        (folder / "flask_wtf").mkdir()
        (folder / "flask_wtf/__init__.py").touch()
        (folder / "flask_wtf/csrf.py").write_text("class CSRFProtect:\n    def init_app(self, app): pass\n")
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def prepare_data(folder: Path) -> str:
    text = folder.with_suffix(".txt")
    text.write_text("".join(f"a document about {n}\n\n" * 9 for n in range(40)))
    return ensure_prepared(DataConfig(path=folder, source=str(text), validation_fraction=0.3), 512).digest


@pytest.mark.usefixtures("server_with_logins")
def test_a_server_that_asks_for_a_login_and_is_killed_in_between_has_everything_once(
    tmp_path: Path, database: str
) -> None:
    """The run goes back five steps meanwhile: their new values come beside the ones before, once."""
    digest = prepare_data(tmp_path / "runs/corpus")
    declare_sweep(tmp_path / "runs", "sweep", "kvm-dist", {})
    port = free_port()
    state = tmp_path / "runs/sample"
    server = (database, port, tmp_path / "server", "--app-name", "basic-auth")
    with trainer(tmp_path, f"http://127.0.0.1:{port}", 1, 20, "FINISHED", pause=10, back=5) as process:
        with mlflow_server(*server):
            assert said(process) == "paused"
            wait_for(lambda: read_state(state).get("last_step") == 10)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert said(process) == "logged"
        wait_for(lambda: bool(read_state(state).get("problem")))
        shutil.rmtree(state / "checkpoints/step-00000010")
        with mlflow_server(*server):
            assert said(process) == "True"
    client = MlflowClient(database)
    run = tracked_run(tmp_path, client)
    assert run.info.status == "FINISHED"
    twice = sorted([*range(1, 21), *range(6, 11)])
    assert sent_steps(client, run) == twice
    assert sent_steps(client, run, "fault/rollbacks") == twice
    assert sent_steps(client, run, "validation/loss") == [5, 10, 10, 15, 20]
    assert run.data.metrics["train/loss"] == 1 + 1 / 20
    assert_the_best_checkpoint_is_found(client, run, state)
    datasets = [(d.dataset.name, d.dataset.digest, d.tags[0].value) for d in run.inputs.dataset_inputs]
    assert sorted(datasets) == [(f"corpus/{s}", digest[:36], s) for s in ("train", "validation")]
    assert client.get_run(run.data.tags["mlflow.parentRunId"]).info.status == "FINISHED"
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


def assert_the_best_checkpoint_is_found(client: MlflowClient, run: Run, run_dir: Path) -> None:
    order = [{"field_name": "metrics.validation/loss", "ascending": True}]
    where = [run.info.experiment_id]
    models = client.search_logged_models(where, order_by=order)
    assert [model.params["step"] for model in models] == ["5", "20", "15", "10"]
    best = models[0]
    assert best.params["path"] == str(run_dir / "checkpoints/step-00000005")
    assert best.tags["manifest_sha256"] == hashlib.sha256(b"{}\n").hexdigest()
    assert [(m.key, m.value, m.step) for m in best.metrics] == [("validation/loss", 5.0, 5)]
    present = client.search_logged_models(where, "tags.checkpoint_status = 'present'", order_by=order)
    assert [model.params["step"] for model in present] == ["5", "20", "15"]


def test_a_rollback_is_told_from_a_resume_by_what_the_database_holds(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVM_DIST_COMMIT", "0123abc")
    config = RunConfig(run_root=tmp_path / "runs", name="sample", tracking=TrackingConfig(uri=database))
    config.run_directory.mkdir()
    starts = ((0, range(1, 11), 0), (5, range(6, 9), 1), (7, range(8, 13), 1))
    for number, (kept, steps, rollbacks) in enumerate(starts):
        truncate_after(config.run_directory / "metrics.jsonl", kept)
        for step in steps:
            metrics = {"train/loss": step + 100.0 * rollbacks, "fault/rollbacks": float(rollbacks)}
            append_metrics(config.run_directory / "metrics.jsonl", step, metrics, 1000.0 * number + step)
        append_event(config.run_directory, Kind.START, str(number), description(config))
        Forwarder(config.run_directory, lambda _: MlflowStore(database, None), str(number)).pump()
    client = MlflowClient(database)
    run = tracked_run(tmp_path, client)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((point.step, point.value) for point in history) == sorted(
        [*((step, float(step)) for step in range(1, 11)), *((step, step + 100.0) for step in range(6, 13))]
    )
    assert run.data.metrics["train/loss"] == 112.0


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


def test_a_process_that_gets_no_processor_is_replaced_at_the_end(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVM_DIST_TRACKING_NICENESS", "1")
    monkeypatch.setattr("kvm_dist.tracking.tracker.PROMPT_SECONDS", 0.1)
    config = RunConfig(run_root=tmp_path / "runs", name="sample", tracking=TrackingConfig(uri=database))
    config.run_directory.mkdir()
    tracked = Tracker(config.run_directory, config)
    starved = tracked._process
    assert starved is not None
    wait_for(lambda: (config.run_directory / "tracking.lock").exists())
    wait_for(lambda: bool((config.run_directory / "tracking.lock").read_text()))
    starved.send_signal(signal.SIGSTOP)
    for step in range(1, 6):
        tracked.log(step, {"train/loss": 1.0})
    assert tracked.close(wait_seconds=PATIENCE_SECONDS)
    assert starved.wait(1) == -signal.SIGKILL
    client = MlflowClient(database)
    run = tracked_run(tmp_path, client)
    assert sent_steps(client, run) == [1, 2, 3, 4, 5]
    assert run.info.status == "FINISHED"


HOLDER = """
import sys, time
from pathlib import Path
from kvm_dist.tracking.lock import alone_at, alone_in
run_dir, database = map(Path, sys.argv[1:])
with alone_in(run_dir, 0, None, False), alone_at(database, 0):
    print("held", flush=True)
    input()
"""


def test_a_process_that_makes_the_tables_is_let_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvm_dist.tracking.lock.GRACE_SECONDS", 0.0)
    database = tmp_path / "mlflow.db"
    command = [sys.executable, "-c", HOLDER, str(tmp_path), str(database)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert said(holder) == "held"
        for takes_over, followed in ((True, database), (False, None)):
            with pytest.raises(BlockingIOError), alone_in(tmp_path, 0.5, followed, takes_over):
                pass
        assert holder.poll() is None
        with alone_in(tmp_path, PATIENCE_SECONDS, None, takes_over=True):
            assert holder.wait(5) == -signal.SIGKILL


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
