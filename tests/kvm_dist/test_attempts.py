"""The starts of a run are written down, and a run that starts again and again for nothing is ended."""

import json
from pathlib import Path

import pytest

from kvm_dist import attempts
from kvm_dist.attempts import begin_attempt, end_attempt, exit_code_after, read_attempts
from kvm_dist.exit_codes import NoProgress


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The step of the newest checkpoint, to be set by the test."""
    found = {"step": 0}
    monkeypatch.setattr(attempts, "newest_step", lambda run_dir: found["step"])
    return found


def fail(run_dir: Path, code: int | None = 70) -> None:
    attempt = begin_attempt(run_dir)
    if code is not None:  # else: killed before it could say anything
        end_attempt(run_dir, attempt.number, code)


def test_a_start_and_its_end_are_one_attempt(tmp_path: Path) -> None:
    begin_attempt(tmp_path, steps=12, job="7")
    end_attempt(tmp_path, 1, 70)
    begin_attempt(tmp_path)
    first, second = read_attempts(tmp_path)
    assert (first.number, first.code, first.job, first.steps, first.checkpoint) == (1, 70, "7", 12, 0)
    assert first.ended is not None
    assert first.ended >= first.started
    assert (second.number, second.code, second.ended) == (2, None, None)


def test_three_bad_ends_without_a_new_checkpoint_are_a_crash_loop(
    tmp_path: Path, newest: dict[str, int]
) -> None:
    newest["step"] = 5
    for code in (70, 71, None):
        assert exit_code_after(tmp_path, 70) == 70
        fail(tmp_path, code)
    assert exit_code_after(tmp_path, 70) == 93
    assert exit_code_after(tmp_path, 0) == 0
    with pytest.raises(NoProgress, match=r"the last 3 starts .* newer than step 5"):
        begin_attempt(tmp_path)


def test_a_person_may_try_once_more_after_the_refusal(tmp_path: Path) -> None:
    for _ in range(3):
        fail(tmp_path)
    with pytest.raises(NoProgress):
        begin_attempt(tmp_path)
    fail(tmp_path)
    assert exit_code_after(tmp_path, 70) == 70
    assert [attempt.number for attempt in read_attempts(tmp_path)] == [1, 2, 3, 4]


def test_a_new_checkpoint_starts_the_count_again(tmp_path: Path, newest: dict[str, int]) -> None:
    for _ in range(2):
        fail(tmp_path)
    begin_attempt(tmp_path)
    newest["step"] = 5  # saved by the third, which then dies
    for _ in range(2):
        assert exit_code_after(tmp_path, 70) == 70
        fail(tmp_path)
    assert exit_code_after(tmp_path, 70) == 70
    fail(tmp_path)
    assert exit_code_after(tmp_path, 70) == 93


def test_preemption_is_no_failure(tmp_path: Path) -> None:
    for code in (70, 70, 75, 70, 70):
        fail(tmp_path, code)
    assert exit_code_after(tmp_path, 70) == 70


def test_a_start_takes_back_the_wish_to_stop(tmp_path: Path) -> None:
    (tmp_path / attempts.STOP_MARKER).touch()
    begin_attempt(tmp_path)
    assert not (tmp_path / attempts.STOP_MARKER).exists()


def test_a_torn_line_costs_one_line(tmp_path: Path) -> None:
    fail(tmp_path)
    with (tmp_path / attempts.ATTEMPTS_NAME).open("a") as file:
        file.write('{"number": 2, "sta')
    fail(tmp_path, 0)
    assert [(attempt.number, attempt.code) for attempt in read_attempts(tmp_path)] == [(1, 70), (2, 0)]
    assert all(json.loads(line) for line in (tmp_path / attempts.ATTEMPTS_NAME).read_text().splitlines()[-2:])
