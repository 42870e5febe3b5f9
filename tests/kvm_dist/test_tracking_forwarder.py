"""The forwarder against a store in memory that fails when told to."""

import math
import shutil
import socket
from pathlib import Path

import pytest

from kvm_dist.attempts import begin_attempt
from kvm_dist.config import DataConfig, RunConfig, TrackingConfig
from kvm_dist.data.first_use import ensure_prepared
from kvm_dist.exit_codes import ConfigError
from kvm_dist.metrics import append_metrics, truncate_after
from kvm_dist.system_metrics import NodeMetrics
from kvm_dist.tracking.address import absolute_uri, artifact_location, redact_uri, scrub, secrets_of
from kvm_dist.tracking.description import description, flatten
from kvm_dist.tracking.events import Kind, Spool, append_end, append_event
from kvm_dist.tracking.events import RunStatus as Status
from kvm_dist.tracking.forwarder import Forwarder, read_state
from kvm_dist.tracking.protocol import Point, Refused, RunGone, Unavailable
from kvm_dist.tracking.sweep import declare_sweep
from tests.kvm_dist.tracking_store import MemoryStore


@pytest.fixture(autouse=True)
def without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking git costs more than all the rest."""
    monkeypatch.setenv("KVM_DIST_COMMIT", "0123abc")


def start(run_dir: Path, store: MemoryStore, attempt: str) -> Forwarder:
    append_event(run_dir, Kind.START, attempt, description(RunConfig(run_root=run_dir.parent, name="sample")))
    return Forwarder(run_dir, lambda _: store, attempt)


def log(run_dir: Path, steps: range, start_seconds: float = 0.0) -> None:
    for step in steps:
        metrics = {"train/loss": 1.0 / step, "train/tokens": float(step)}
        append_metrics(run_dir / "metrics.jsonl", step, metrics, seconds=start_seconds + step)


def log_again(run_dir: Path, steps: range, rollbacks: int, start_seconds: float) -> None:
    """With the losses that a run has after so many rollbacks."""
    for step in steps:
        metrics = {"train/loss": step + 100.0 * rollbacks, "fault/rollbacks": float(rollbacks)}
        append_metrics(run_dir / "metrics.jsonl", step, metrics, seconds=start_seconds + step)


def steps_of(store: MemoryStore, run_id: str = "run-0", key: str = "train/loss") -> list[int]:
    return [point.step for point in store.runs[run_id] if point.key == key]


def test_every_metric_of_every_step_is_sent_once(tmp_path: Path) -> None:
    store = MemoryStore()
    forwarder = start(tmp_path, store, "one")
    for begin in (1, 6, 11):
        log(tmp_path, range(begin, begin + 5))
        forwarder.pump()
        forwarder.pump()
    assert steps_of(store) == steps_of(store, key="train/tokens") == list(range(1, 16))
    assert store.runs["run-0"][0] == Point("train/loss", 1.0, 1000, 1)


def test_many_steps_go_in_few_calls(tmp_path: Path) -> None:
    store = MemoryStore()
    log(tmp_path, range(1, 1201))
    start(tmp_path, store, "one").pump()
    assert len(steps_of(store)) == 1200
    assert store.batches == 3


def test_an_outage_loses_and_doubles_nothing(tmp_path: Path) -> None:
    def down(_: str) -> None:
        raise Unavailable("down")

    store = MemoryStore()
    forwarder = start(tmp_path, store, "one")
    store.fault = down
    log(tmp_path, range(1, 4))
    with pytest.raises(Unavailable):
        forwarder.pump()
    store.fault = lambda _: None
    forwarder.pump()
    store.fault = down
    log(tmp_path, range(4, 8))
    with pytest.raises(Unavailable):
        forwarder.pump()
    store.fault = lambda _: None
    store.committed_but_unanswered = True
    with pytest.raises(Unavailable):
        forwarder.pump()
    forwarder.pump()
    assert steps_of(store) == list(range(1, 8))


def test_a_resume_from_an_older_checkpoint_sends_no_step_twice(tmp_path: Path) -> None:
    store = MemoryStore()
    forwarder = start(tmp_path, store, "one")
    log(tmp_path, range(1, 11))
    forwarder.pump()
    log(tmp_path, range(11, 13))  # never sent by the first process
    (tmp_path / "tracking.json").unlink()
    truncate_after(tmp_path / "metrics.jsonl", 5)
    forwarder = start(tmp_path, store, "two")
    log(tmp_path, range(6, 16), start_seconds=1000.0)
    forwarder.pump()
    assert steps_of(store) == list(range(1, 16))
    assert list(store.runs) == ["run-0"], "a resume goes on in the same run"


@pytest.mark.parametrize("other_process", [False, True])
def test_steps_taken_again_after_a_rollback_bring_their_new_values_once(
    tmp_path: Path, other_process: bool
) -> None:
    store = MemoryStore()
    forwarder = start(tmp_path, store, "one")
    log_again(tmp_path, range(1, 11), 0, 0.0)
    NodeMetrics(tmp_path, "node1", [lambda: {"cpu_utilization_percentage": 50.0}]).sample()
    forwarder.pump()
    truncate_after(tmp_path / "metrics.jsonl", 5)
    for steps in (range(6, 9), range(9, 13)):
        if other_process:
            (tmp_path / "tracking.json").unlink()
            forwarder = start(tmp_path, store, f"from {steps[0]}")
        log_again(tmp_path, steps, 1, 1000.0)
        forwarder.pump()
        forwarder.pump()
    assert steps_of(store) == [*range(1, 11), *range(6, 13)]
    assert read_state(tmp_path)["last_step"] == 12

    truncate_after(tmp_path / "metrics.jsonl", 9)  # a resume from a checkpoint after the rollback
    forwarder = start(tmp_path, store, "resumed")
    log_again(tmp_path, range(10, 15), 1, 2000.0)
    forwarder.pump()
    assert steps_of(store) == [*range(1, 11), *range(6, 15)]
    newest = {p.step: p.value for p in store.runs["run-0"] if p.key == "train/loss"}
    assert newest == {step: step + 100.0 * (step > 5) for step in range(1, 15)}
    assert steps_of(store, key="system/node1/cpu_utilization_percentage") == [1]


def test_a_second_rollback_goes_back_further(tmp_path: Path) -> None:
    store = MemoryStore()
    log_again(tmp_path, range(1, 11), 0, 0.0)
    start(tmp_path, store, "one").pump()
    for rollbacks, left in ((1, 8), (2, 3)):
        truncate_after(tmp_path / "metrics.jsonl", left)
        log_again(tmp_path, range(left + 1, left + 4), rollbacks, 1000.0 * rollbacks)
        start(tmp_path, store, f"back to {left}").pump()
    assert steps_of(store) == [*range(1, 11), *range(9, 12), *range(4, 7)]


def test_a_spool_replaced_under_a_running_process_is_noticed(tmp_path: Path) -> None:
    store = MemoryStore()
    forwarder = start(tmp_path, store, "one")
    log(tmp_path, range(1, 11))
    forwarder.pump()
    truncate_after(tmp_path / "metrics.jsonl", 5)
    log(tmp_path, range(6, 21), start_seconds=1000.0)
    forwarder.pump()
    assert steps_of(store) == list(range(1, 21))


def test_the_end_waits_for_the_last_metrics(tmp_path: Path) -> None:
    store = MemoryStore()
    forwarder = start(tmp_path, store, "one")
    log(tmp_path, range(1, 4))
    append_event(tmp_path, Kind.END, "one", {"status": "FINISHED"})
    forwarder.pump()
    assert forwarder.ended
    assert steps_of(store) == [1, 2, 3]
    assert store.status == {"run-0": "FINISHED"}


def test_the_late_end_of_an_older_attempt_changes_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    first = start(tmp_path, store, "one")
    first.pump()
    second = start(tmp_path, store, "two")
    append_event(tmp_path, Kind.END, "one", {"status": "KILLED"})
    assert first.superseded()
    assert not second.superseded()
    second.pump()
    assert store.status["run-0"] == "RUNNING"
    assert not second.ended


def test_a_killed_attempt_is_ended_once_and_only_by_its_own_process(tmp_path: Path) -> None:
    start(tmp_path, MemoryStore(), "one")
    append_end(tmp_path, "one", Status.KILLED)
    size = (tmp_path / "tracking-events.jsonl").stat().st_size
    append_end(tmp_path, "one", Status.KILLED)
    assert (tmp_path / "tracking-events.jsonl").stat().st_size == size
    start(tmp_path, MemoryStore(), "two")
    size = (tmp_path / "tracking-events.jsonl").stat().st_size
    append_end(tmp_path, "one", Status.KILLED)
    assert (tmp_path / "tracking-events.jsonl").stat().st_size == size


def test_a_run_made_just_before_a_kill_is_found_again(tmp_path: Path) -> None:
    store = MemoryStore()
    start(tmp_path, store, "one").pump()
    (tmp_path / "mlflow_run_id").unlink()
    start(tmp_path, store, "two").pump()
    assert list(store.runs) == ["run-0"]
    assert (tmp_path / "mlflow_run_id").read_text() == "run-0\n"


def test_another_store_gets_the_whole_run(tmp_path: Path) -> None:
    log(tmp_path, range(1, 6))
    start(tmp_path, MemoryStore(), "one").pump()
    other = MemoryStore()
    other.runs["run-other"] = []
    forwarder = start(tmp_path, other, "two")
    with pytest.raises(RunGone):
        forwarder.pump()
    forwarder.pump()
    assert steps_of(other, "run-1") == [1, 2, 3, 4, 5]
    assert other.params["train.steps"] == "6000"


def test_checkpoints_go_by_reference_and_large_or_missing_files_not_at_all(tmp_path: Path) -> None:
    store = MemoryStore()
    forwarder = start(tmp_path, store, "one")
    fields = {"path": "/far/step-00000005", "step": 5, "manifest_sha256": "ab", "bytes": 7}
    append_event(tmp_path, Kind.CHECKPOINT, "one", fields)
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(26 << 20)
    (tmp_path / "small.png").write_bytes(b"x")
    for name in ("large.bin", "absent.png", "small.png"):
        append_event(tmp_path, Kind.ARTIFACT, "one", {"path": str(tmp_path / name), "folder": "plots"})
    forwarder.pump()
    assert store.uploads == ["checkpoints/step-00000005.json", "plots/small.png"]
    assert store.tags["checkpoint.path"] == "/far/step-00000005"
    assert store.tags["checkpoint.manifest_sha256"] == "ab"


def test_files_that_cannot_be_uploaded_do_not_hold_the_metrics_up(tmp_path: Path) -> None:
    def no_uploads(what: str) -> None:
        if what == "upload":
            raise Unavailable("the artifact store is away")

    store = MemoryStore()
    store.fault = no_uploads
    (tmp_path / "config.yaml").write_text("name: sample\n")
    forwarder = start(tmp_path, store, "one")
    log(tmp_path, range(1, 4))
    for _ in range(2):
        with pytest.raises(Unavailable):
            forwarder.pump()
    forwarder.pump()
    assert steps_of(store) == [1, 2, 3]


def test_a_refused_batch_is_passed_over(tmp_path: Path) -> None:
    def refuse(what: str) -> None:
        if what == "points":
            raise Refused("no")

    store = MemoryStore()
    forwarder = start(tmp_path, store, "one")
    store.fault = refuse
    log(tmp_path, range(1, 4))
    forwarder.pump()
    store.fault = lambda _: None
    log(tmp_path, range(4, 6))
    forwarder.pump()
    assert steps_of(store) == [4, 5]


def test_values_that_are_not_finite_are_sent_as_nan(tmp_path: Path) -> None:
    store = MemoryStore()
    append_metrics(tmp_path / "metrics.jsonl", 1, {"a": math.inf})
    start(tmp_path, store, "one").pump()
    assert math.isnan(store.runs["run-0"][0].value)


def test_the_state_file_tells_how_far_it_is(tmp_path: Path) -> None:
    forwarder = start(tmp_path, MemoryStore(), "one")
    log(tmp_path, range(1, 4))
    forwarder.pump()
    assert read_state(tmp_path)["last_step"] == 3
    forwarder.report_problem("no route to host")
    assert read_state(tmp_path)["problem"] == "no route to host"


def checkpoint(run_dir: Path, step: int) -> Path:
    path = run_dir / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    fields = {"path": str(path), "step": step, "manifest_sha256": "ab", "bytes": 7}
    append_event(run_dir, Kind.CHECKPOINT, "one", fields)
    return path


def log_validation(run_dir: Path, step: int, loss: float) -> None:
    metrics = {"train/loss": 9.0, "validation/loss": loss}
    append_metrics(run_dir / "metrics.jsonl", step, metrics, seconds=float(step))


@pytest.mark.parametrize("told_late", [False, True])
def test_a_checkpoint_gets_the_validation_metrics_of_its_own_step(tmp_path: Path, told_late: bool) -> None:
    store = MemoryStore()
    forwarder = start(tmp_path, store, "one")
    if told_late:
        log_validation(tmp_path, 5, 0.5)
        log_validation(tmp_path, 6, 0.4)
    checkpoint(tmp_path, 5)
    forwarder.pump()
    if not told_late:
        assert store.model_points == {}, "its line is not written yet"
        log_validation(tmp_path, 5, 0.5)
    forwarder.pump()
    assert store.model_points == {"step-00000005": {Point("validation/loss", 0.5, 5000, 5)}}
    assert steps_of(store, key="validation/loss") == ([5, 6] if told_late else [5])
    assert (
        store.models["step-00000005"] | {"step": "5", "manifest_sha256": "ab"}
        == store.models["step-00000005"]
    )


def test_a_step_saved_again_by_a_resumed_run_brings_no_second_value(tmp_path: Path) -> None:
    store = MemoryStore()
    path = checkpoint_of_a_killed_attempt(tmp_path, store)
    log_again = {"train/loss": 9.0, "validation/loss": 0.5}
    append_metrics(tmp_path / "metrics.jsonl", 5, log_again, seconds=700.0)
    forwarder = start(tmp_path, store, "two")
    fields = {"path": str(path), "step": 5, "manifest_sha256": "cd", "bytes": 7}
    append_event(tmp_path, Kind.CHECKPOINT, "two", fields)
    forwarder.pump()
    assert steps_of(store, key="validation/loss") == [5]
    assert store.model_points == {"step-00000005": {Point("validation/loss", 0.5, 5000, 5)}}
    assert store.models["step-00000005"]["manifest_sha256"] == "cd"


def test_a_checkpoint_saved_again_after_a_rollback_is_judged_by_its_new_value(tmp_path: Path) -> None:
    store = MemoryStore()
    checkpoint_of_a_killed_attempt(tmp_path, store)
    metrics = {"validation/loss": 0.7, "fault/rollbacks": 1.0}
    append_metrics(tmp_path / "metrics.jsonl", 5, metrics, seconds=700.0)
    forwarder = start(tmp_path, store, "two")
    fields = {"path": "/far/step-00000005", "step": 5, "manifest_sha256": "cd", "bytes": 7}
    append_event(tmp_path, Kind.CHECKPOINT, "two", fields)
    store.model_points.clear()
    forwarder.pump()
    assert steps_of(store, key="validation/loss") == [5, 5]
    assert store.model_points == {"step-00000005": {Point("validation/loss", 0.7, 700_000, 5)}}


def checkpoint_of_a_killed_attempt(run_dir: Path, store: MemoryStore) -> Path:
    forwarder = start(run_dir, store, "one")
    path = checkpoint(run_dir, 5)
    log_validation(run_dir, 5, 0.5)
    forwarder.pump()
    truncate_after(run_dir / "metrics.jsonl", 2)
    return path


def test_a_checkpoint_that_was_deleted_is_marked_also_after_a_restart(tmp_path: Path) -> None:
    store = MemoryStore()
    forwarder = start(tmp_path, store, "one")
    paths = [checkpoint(tmp_path, step) for step in (5, 10)]
    for step in (5, 10):
        log_validation(tmp_path, step, 0.5)
    forwarder.pump()
    assert [model["checkpoint_status"] for model in store.models.values()] == ["present", "present"]
    shutil.rmtree(paths[0])
    start(tmp_path, store, "two").pump()
    assert [model["checkpoint_status"] for model in store.models.values()] == ["deleted", "present"]
    (tmp_path / "checkpoints").rename(tmp_path / "moved")
    start(tmp_path, store, "three").pump()
    assert store.models["step-00000010"]["checkpoint_status"] == "present", (
        "a disk that is away deletes nothing"
    )


def test_a_store_without_models_still_gets_every_metric(tmp_path: Path) -> None:
    def no_models(what: str) -> None:
        if what == "model":
            raise Unavailable("no such endpoint")

    store = MemoryStore()
    store.fault = no_models
    forwarder = start(tmp_path, store, "one")
    checkpoint(tmp_path, 1)
    log(tmp_path, range(1, 4))
    for _ in range(2):
        with pytest.raises(Unavailable):
            forwarder.pump()
    forwarder.pump()
    assert steps_of(store) == [1, 2, 3]


def test_what_the_nodes_measured_is_sent_once_under_their_names(tmp_path: Path) -> None:
    store = MemoryStore()
    forwarder = start(tmp_path, store, "one")
    for node in ("node1", "node2"):
        sampler = NodeMetrics(tmp_path, node, [lambda: {"cpu_utilization_percentage": 50.0}])
        for _ in range(3):
            sampler.sample()
            forwarder.pump()
    start(tmp_path, store, "two").pump()
    for node in ("node1", "node2"):
        assert steps_of(store, key=f"system/{node}/cpu_utilization_percentage") == [1, 2, 3]


def test_both_splits_of_the_data_are_told_with_its_digest(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"a document about {n}\n\n" * 9 for n in range(40)))
    data = DataConfig(path=tmp_path / "corpus", source=str(tmp_path / "text.txt"), validation_fraction=0.3)
    index = ensure_prepared(data, 512)
    store = MemoryStore()
    append_event(tmp_path, Kind.START, "one", description(RunConfig(run_root=tmp_path.parent, data=data)))
    Forwarder(tmp_path, lambda _: store, "one").pump()
    assert [(d.name, d.digest, d.tokens, d.context) for d in store.datasets] == [
        ("corpus/train", index.digest, index.tokens("train"), "train"),
        ("corpus/validation", index.digest, index.tokens("validation"), "validation"),
    ]


def test_a_run_is_tagged_with_its_job_and_surroundings(tmp_path: Path) -> None:
    environment = {"SLURM_JOB_ID": "18", "SLURM_ARRAY_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[1-2]"}
    begin_attempt(tmp_path)
    config = RunConfig(run_root=tmp_path.parent, name=tmp_path.name)
    tags = description(config, environment | {"KVM_DIST_COMMIT": "abc"})["tags"]
    assert tags["mlflow.source.git.commit"] == "abc"
    assert (tags["slurm.job_id"], tags["slurm.nodes"]) == ("17", "node[1-2]")
    assert (tags["kvm_dist.attempt"], tags["kvm_dist.host"]) == ("1", socket.gethostname())
    assert tags["kvm_dist.layout"] == "1 data x 1 sequence ranks, ZeRO-1, float32"
    assert not [tag for tag in description(config, {})["tags"] if tag.startswith("slurm")]


def test_the_runs_of_a_sweep_share_one_finished_parent(tmp_path: Path) -> None:
    store = MemoryStore()
    key = declare_sweep(tmp_path, "sweep", "experiment", {"kvm_dist.varied": "seed"})
    assert declare_sweep(tmp_path, "again", "experiment", {}) == key
    for name in ("000-seed-1", "001-seed-2"):
        (tmp_path / name).mkdir()
        start(tmp_path / name, store, name).pump()
        assert store.tags["mlflow.parentRunId"] == store.keys[key]
    assert len(store.runs) == 3
    assert store.status[store.keys[key]] == "FINISHED"


def test_a_run_outside_of_a_sweep_has_no_parent(tmp_path: Path) -> None:
    store = MemoryStore()
    start(tmp_path, store, "one").pump()
    assert "mlflow.parentRunId" not in store.tags


def test_a_spool_gives_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    spool = Spool(path)
    assert spool.read() == []
    path.write_bytes(b"one\ntwo\nthr")
    assert spool.read() == [(b"one\n", 4), (b"two\n", 8)]
    spool.advance(8)
    with path.open("ab") as file:
        file.write(b"ee\n")
    assert spool.read() == [(b"three\n", 14)]


@pytest.mark.parametrize("uri", ["file:///somewhere/mlruns", "mlruns", "./mlruns", "/abs/mlruns"])
def test_plain_folders_are_refused_with_a_hint(uri: str) -> None:
    with pytest.raises(ConfigError, match="sqlite:///") as caught:
        absolute_uri(uri)
    assert caught.value.code == 64


def test_a_sqlite_path_is_made_absolute_and_its_folder_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_uri("sqlite:///runs/new/mlflow.db") == f"sqlite:///{tmp_path}/runs/new/mlflow.db"
    assert (tmp_path / "runs/new").is_dir()
    assert absolute_uri(f"sqlite:///{tmp_path}/x.db?timeout=9") == f"sqlite:///{tmp_path}/x.db?timeout=9"
    assert absolute_uri("http://host:5000") == "http://host:5000"
    assert artifact_location("http://host:5000", "e") is None
    assert artifact_location(f"sqlite:///{tmp_path}/x.db", "../e") == f"file://{tmp_path}/mlartifacts/-e"


@pytest.mark.parametrize(
    "uri",
    [
        "https://me:hush@host",
        "postgresql://host/x?sslmode=require&password=hush",
        "http://host/?api_key=hush",
    ],
)
def test_an_address_with_a_secret_is_refused_as_it_would_be_stored(uri: str) -> None:
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_PASSWORD"):
        TrackingConfig(uri=uri)
    assert TrackingConfig(uri="sqlite:///x/mlflow.db?timeout=9").uri


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("https://me:s3cret@host:5000/path", "https://***@host:5000/path"),
        ("https://me:s3c@ret@host", "https://***@host"),
        (
            "postgresql://u:p@db/x?sslmode=require&password=hush",
            "postgresql://***@db/x?sslmode=***&password=***",
        ),
        ("sqlite:////abs/mlflow.db", "sqlite:////abs/mlflow.db"),
        ("no address", "no address"),
    ],
)
def test_addresses_are_shown_without_secrets(uri: str, shown: str) -> None:
    assert redact_uri(uri) == shown


def test_secrets_in_params_and_logs_are_hidden() -> None:
    tree = {
        "tracking": {"uri": "http://u:hush@h", "api_key": "hush"},
        "data": {"tokenizer": "bytes", "tokens": 3},
    }
    assert flatten(tree) == {
        "tracking.uri": "http://***@h",
        "tracking.api_key": "***",
        "data.tokenizer": "bytes",
        "data.tokens": "3",
    }
    environment = {
        "MLFLOW_TRACKING_PASSWORD": "planted-1",
        "TOKENIZERS_PARALLELISM": "false",
        "HOME": "/home/me",
    }
    hidden = secrets_of("http://u:a%40b@h/?token=planted-2", environment)
    text = scrub("u:a%40b a@b planted-1 planted-2 false /home/me", hidden)
    assert text == "*** *** *** *** false /home/me"


def test_the_login_that_mlflow_keeps_in_the_home_folder_is_hidden_also_as_a_header(tmp_path: Path) -> None:
    folder = tmp_path / ".mlflow"
    folder.mkdir()
    login = "mlflow_tracking_username = me\nmlflow_tracking_password = pl%nt\n"
    (folder / "credentials").write_text(f"[mlflow]\n{login}")
    hidden = secrets_of("http://host", {"HOME": str(tmp_path)})
    assert scrub("me pl%nt Basic bWU6cGwlbnQ=", hidden) == "me *** Basic ***"
    (folder / "credentials").write_text("no file of this kind")
    assert scrub("me pl%nt", secrets_of("http://host", {"HOME": str(tmp_path)})) == "me pl%nt"
