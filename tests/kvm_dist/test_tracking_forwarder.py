"""The forwarder against a store in memory that fails when told to."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvm_dist.config import RunConfig
from kvm_dist.exit_codes import ConfigError
from kvm_dist.metrics import append_metrics, truncate_after
from kvm_dist.tracking.address import absolute_uri, artifact_location, redact_uri, scrub, secrets_of
from kvm_dist.tracking.events import Kind, Spool, append_end, append_event
from kvm_dist.tracking.events import RunStatus as Status
from kvm_dist.tracking.forwarder import Forwarder, Point, Refused, RunGone, Unavailable, read_state
from kvm_dist.tracking.tracker import description, flatten


class MemoryStore:
    """Keeps what it gets. `fault` is called before every write and may raise."""

    def __init__(self) -> None:
        self.runs: dict[str, list[Point]] = {}
        self.keys: dict[str, str] = {}
        self.status: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.params: dict[str, str] = {}
        self.uploads: list[str] = []
        self.batches = 0
        self.fault: Callable[[str], None] = lambda _: None
        self.committed_but_unanswered = False

    def find_run(self, experiment: str, run_key: str) -> str | None:
        return self.keys.get(run_key)

    def create_run(self, experiment: str, name: str, tags: dict[str, str], milliseconds: int) -> str:
        self.fault("create")
        run_id = f"run-{len(self.runs)}"
        self.runs[run_id] = []
        self.keys[tags["kvm_dist.run_key"]] = run_id
        return run_id

    def last_steps(self, run_id: str) -> dict[str, int]:
        if run_id not in self.runs:
            raise RunGone(run_id)
        return {point.key: point.step for point in sorted(self.runs[run_id], key=lambda point: point.step)}

    def log_points(self, run_id: str, points: list[Point]) -> None:
        self.fault("points")
        self.batches += 1
        known = set(self.runs[run_id])
        self.runs[run_id] += [point for point in points if point not in known]
        if self.committed_but_unanswered:
            self.committed_but_unanswered = False
            raise Unavailable("the answer was lost")

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        self.tags |= tags

    def log_params(self, run_id: str, params: dict[str, str]) -> None:
        self.params = params | self.params

    def upload(self, run_id: str, path: Path, folder: str) -> None:
        self.fault("upload")
        self.uploads.append(f"{folder}/{path.name}")

    def upload_record(self, run_id: str, record: dict[str, Any], name: str) -> None:
        self.fault("upload")
        self.uploads.append(name)

    def set_status(self, run_id: str, status: str, milliseconds: int | None) -> None:
        self.fault("status")
        self.status[run_id] = status


def start(run_dir: Path, store: MemoryStore, attempt: str) -> Forwarder:
    append_event(run_dir, Kind.START, attempt, description(RunConfig(run_root=run_dir.parent, name="sample")))
    return Forwarder(run_dir, lambda _: store, attempt)


def log(run_dir: Path, steps: range, start_seconds: float = 0.0) -> None:
    for step in steps:
        metrics = {"train/loss": 1.0 / step, "train/tokens": float(step)}
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
