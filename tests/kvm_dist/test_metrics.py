"""metrics.jsonl: whole lines, valid JSON, nothing twice after a resume."""

import json
import math
import multiprocessing
from pathlib import Path

import pytest

from kvm_dist.metrics import append_metrics, read_metrics, rewind, truncate_after


def write_steps(path: Path, steps: range) -> None:
    for step in steps:
        append_metrics(path, step, {"train/loss": 1 / (step + 1)}, seconds=100.0 + step)


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    append_metrics(path, 3, {"train/loss": 1 / 3, "train/tokens": 12}, seconds=5.5)
    assert read_metrics(path) == [{"step": 3, "time": 5.5, "train/loss": 1 / 3, "train/tokens": 12.0}]


def test_values_that_are_not_finite_leave_the_line_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, 1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert (line["a"], line["b"], line["d"]) == (None, None, 1.0)
    (values,) = read_metrics(path)
    assert math.isnan(values["a"])
    assert (values["b"], values["c"]) == (math.inf, -math.inf)


def test_a_resume_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 11))
    with path.open("a") as file:
        file.write('{"step":11,"time":1.0,"train/l')
    truncate_after(path, 7)
    assert [values["step"] for values in read_metrics(path)] == list(range(1, 8))
    write_steps(path, range(8, 10))
    assert [values["step"] for values in read_metrics(path)] == list(range(1, 10))
    truncate_after(path, -1)
    assert path.read_bytes() == b""
    truncate_after(tmp_path / "absent.jsonl", 3)


def test_a_torn_line_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1))
    with path.open("a") as file:
        file.write('{"step":1,"ti')
    write_steps(path, range(2, 4))
    assert [values["step"] for values in read_metrics(path)] == [0, 2, 3]


@pytest.mark.parametrize(
    "line", ["[]", "null", '{"step":"1","time":1}', '{"step":true,"time":1}', '{"time":1}']
)
def test_foreign_lines_are_passed_over(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    write_steps(path, range(1))
    assert [values["step"] for values in read_metrics(path)] == [0]


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=write_steps, args=(path, range(i * 200, i * 200 + 200))) for i in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(values["step"] for values in read_metrics(path)) == list(range(600))


def test_rewinding_adds_the_line_that_a_kill_between_save_and_log_has_cost(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 4):
        append_metrics(path, step, {"train/loss": float(step)})
    rewind(path, 3, {"train/loss": 3.0})
    rewind(path, 3, {"train/loss": 9.0})
    assert [(line["step"], line["train/loss"]) for line in read_metrics(path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
    ]
