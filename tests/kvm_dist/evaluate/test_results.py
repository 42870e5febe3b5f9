"""What an evaluation leaves behind, and where."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from kvm_dist.config import RunConfig, TrackingConfig
from kvm_dist.evaluate.results import Subject, draw_again, metric_names, read_records, record_of, write_record
from kvm_dist.evaluate.tasks import TASKS, Options, Outcome
from kvm_dist.exit_codes import StorageError
from kvm_dist.tracking.description import description
from kvm_dist.tracking.evaluation import track_evaluation
from kvm_dist.tracking.events import Kind, append_event
from kvm_dist.tracking.forwarder import Forwarder
from tests.kvm_dist.evaluate.tiny_checkpoint import TinyRun
from tests.kvm_dist.tracking_store import MemoryStore

CHECKPOINT = Path("runs/one/checkpoints/step-00000050")


def test_results_of_a_run_lie_in_it_and_those_of_other_folders_here_or_where_they_are_sent() -> None:
    subject = Subject("needle", CHECKPOINT)
    assert subject.record_path(None) == Path("runs/one/evaluations/needle-step-00000050.json").absolute()
    assert subject.picture_path(None) == Path("runs/one/plots/needle-step-00000050.png").absolute()
    assert subject.record_path(Path("out")) == Path("out/needle-one-step-00000050.json")
    other = Subject("lm-eval:a,b", Path("exported"))
    assert other.run is None
    assert other.record_path(None) == Path("evaluations/lm-eval-a-b-exported.json")


def test_another_model_by_overrides_has_another_file_and_other_metrics() -> None:
    subject = Subject("needle", CHECKPOINT, ("model.kvm.budget.factor=32",))
    assert subject.name(None) == "needle-step-00000050-model.kvm.budget.factor=32"
    assert metric_names(subject, {"S1/all": 1.0}) == {
        "evaluation/needle/model.kvm.budget.factor_32/S1/all": 1.0
    }
    assert metric_names(Subject("lm-eval:a", CHECKPOINT), {"a/acc": 1.0}) == {"evaluation/lm-eval/a/acc": 1.0}
    long = [
        Subject("needle", CHECKPOINT, (f"model.x={'y' * 300}{number}",)).name(None) for number in range(2)
    ]
    assert len(set(long)) == 2
    assert max(map(len, long)) <= 120


def test_a_record_tells_what_was_measured_and_appears_whole(tiny_run: TinyRun, tmp_path: Path) -> None:
    opened = tiny_run.open("model.kvm.budget.factor=5")
    outcome = Outcome({"loss": math.nan}, {"list": (1, math.inf)}, {"seed": 3}, ("a",), [("1",)])
    subject = Subject("perplexity", opened.path, ("model.kvm.budget.factor=5",))
    path = tmp_path / "new" / "record.json"
    write_record(record_of(subject, opened, outcome, 1.5), path)
    record = json.loads(path.read_text())
    assert (record["step"], record["overrides"]) == (50, ["model.kvm.budget.factor=5"])
    assert record["metrics"] == {"loss": None}
    assert record["details"] == {"list": [1, None]}
    assert {"kvm-dist", "torch", "python"} <= set(record["versions"])
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]
    with pytest.raises(StorageError, match=r"cannot be written: .*give --out DIR"):
        write_record(record, path / "below" / "a.json")


def needle_record(name: str = "one") -> dict[str, Any]:
    cells = [
        {"needle": needle, "tokens": tokens, "depth": depth, "found": 1, "samples": 2}
        for needle in ("S1", "S2")
        for tokens in (500, 4096)
        for depth in (0.0, 0.5, 1.0)
    ]
    settings = {"lengths": [500, 4096], "depths": [0.0, 0.5, 1.0], "samples": 2, "training_context": 512}
    identity = {"task": "needle", "name": name, "step": 50, "overrides": []}
    return {**identity, "settings": settings, "details": {"cells": cells}}


def position_record(name: str = "one", blocks: int = 3) -> dict[str, Any]:
    bands = ("mean", "standard_error", "lower_quartile", "upper_quartile")
    found: dict[str, list[Any]] = {band: [2.0 / (number + 1) for number in range(blocks)] for band in bands}
    found["mean"][1:2] = [None]  # as it is read back where a model has diverged
    return {
        "task": "position-loss",
        "name": name,
        "step": 50,
        "overrides": [],
        "model": {"tokenizer": "bytes"},
        "settings": {"documents": 4, "minimum_tokens": 48, "training_context": 20},
        "details": {"block_tokens": 16, "blocks": found},
    }


def size_of(picture: Path) -> tuple[int, int]:
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    return width, height


@pytest.mark.parametrize(
    "records",
    [
        [needle_record()],
        [needle_record(), needle_record("two")],
        [position_record()],
        [position_record(blocks=1)],
        [position_record(), position_record("two", blocks=2)],
        [needle_record() | {"step": 0, "settings": needle_record()["settings"] | {"training_context": None}}],
        [position_record() | {"settings": position_record()["settings"] | {"training_context": None}}],
    ],
)
def test_records_of_one_checkpoint_and_of_several_become_a_picture(
    records: list[dict[str, Any]], tmp_path: Path
) -> None:
    drawn = TASKS[records[0]["task"]].draw(records, tmp_path / "plots" / "picture.png")
    assert drawn == [tmp_path / "plots" / "picture.png"]
    assert size_of(drawn[0]) == (1600, 1000)


def test_the_pictures_of_a_run_are_drawn_again_from_its_records(tmp_path: Path) -> None:
    write_record(needle_record(), tmp_path / "evaluations" / "needle-step-00000050.json")
    write_record({"task": "perplexity"}, tmp_path / "evaluations" / "perplexity.json")
    (tmp_path / "evaluations" / "torn.json").write_text("{")
    (tmp_path / "evaluations" / "other.json").write_text('{"task": "other"}')
    assert len(read_records(tmp_path / "evaluations")) == 2
    assert draw_again(tmp_path) == [tmp_path / "plots" / "needle-step-00000050.png"]


def tracked_run(run_dir: Path, store: MemoryStore) -> tuple[RunConfig, Forwarder]:
    config = RunConfig(run_root=run_dir.parent, name="sample")
    append_event(run_dir, Kind.START, "one", description(config))
    checkpoint = {"path": str(run_dir), "step": 5, "manifest_sha256": "0", "bytes": 1}
    append_event(run_dir, Kind.CHECKPOINT, "one", checkpoint)
    return config, Forwarder(run_dir, lambda _: store, "one")


def test_results_reach_the_run_and_the_model_of_their_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVM_DIST_COMMIT", "0123abc")
    started: list[list[str]] = []

    def start(command: list[str], **settings: Any) -> Any:
        started.append(command)
        return type("Ended", (), {"returncode": 1})

    monkeypatch.setattr("kvm_dist.tracking.evaluation.subprocess.run", start)
    store = MemoryStore()
    config, forwarder = tracked_run(tmp_path, store)
    metrics = {"evaluation/needle/S1/all": 0.5, "evaluation/needle/S2/all": math.nan}
    record = tmp_path / "record.json"
    record.write_text("{}")
    assert track_evaluation(tmp_path, config, 5, metrics, [record]) is False
    assert track_evaluation(tmp_path, config, 6, metrics, []) is False
    assert started[0][1:4] == ["-m", "kvm_dist.tracking", str(tmp_path)]
    forwarder.pump()
    values = [(point.key, point.value, point.step) for point in store.runs["run-0"]]
    assert values == [("evaluation/needle/S1/all", 0.5, step) for step in (5, 6)]
    (model_points,) = store.model_points.values()
    assert [point.step for point in model_points] == [5]
    assert "evaluations/record.json" in store.uploads


def test_a_run_without_tracking_is_left_alone(tmp_path: Path) -> None:
    off = RunConfig(tracking=TrackingConfig(enabled=False))
    assert track_evaluation(tmp_path, RunConfig(), 5, {"a": 1.0}, []) is None
    append_event(tmp_path, Kind.START, "one", {})
    assert track_evaluation(tmp_path, off, 5, {"a": 1.0}, []) is None


def test_options_that_no_task_can_use_are_refused() -> None:
    for wrong in ({"tokens": (0,)}, {"depths": (1.5,)}, {"samples": 0}, {"limit": 0}):
        with pytest.raises(ValueError, match="want"):
            Options(**wrong)  # type: ignore[arg-type]
