"""`logs` shows what ranks said; `--follow` goes on through restarts and new files, and ends with the run."""

import os
import threading
from pathlib import Path

import pytest

from kvm_dist.exit_codes import ConfigError
from kvm_dist.run_directory import RunDirectory
from launch.follow import Follower, Tail, show_logs
from launch.status_run import read_status
from tests.launch.run_samples import attempt, hold, write_run
from tests.launch.silent_ranks import wait_until


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path, "a")


def say(run: Path, rank: int, text: str) -> None:
    with (run / f"logs/rank-{rank:05d}.log").open("a") as log:
        log.write(text)


def follower(run: Path, rank: int | None = None) -> tuple[Follower, list[str]]:
    said: list[str] = []
    return Follower(RunDirectory(run), rank, lambda: read_status(run, {}), said.append), said


def test_all_ranks_are_shown_with_their_number_and_one_without(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say(run, 0, "one\ntwo\n")
    say(run, 12, "three\n")
    say(run, 3, "no end of line")
    (run / "logs/tracking.log").write_text("not a rank's\n")
    show_logs(run, run.parent, None, follow=False)
    assert capsys.readouterr().out == "  0 | one\n  0 | two\n  3 | no end of line\n 12 | three\n"
    show_logs(run, run.parent, 12, follow=False)
    assert capsys.readouterr().out == "three\n"
    with pytest.raises(ConfigError, match="no log of rank 7"):
        show_logs(run, run.parent, 7, follow=False)


def test_new_lines_come_as_they_are_finished_and_a_rank_may_join_later(run: Path) -> None:
    attempt(run)
    follow, said = follower(run)
    say(run, 0, "one\ntw")
    assert follow.print_new()
    say(run, 0, "o\n")
    say(run, 1, "hello\n")
    assert follow.print_new()
    assert not follow.print_new()
    assert said == ["--- attempt 1\n", "  0 | one\n", "  0 | two\n", "  1 | hello\n"]


def test_a_follow_begins_with_the_last_lines(run: Path) -> None:
    say(run, 0, "".join(f"line {number}\n" for number in range(10_000)))
    follow, said = follower(run, rank=0)
    follow.print_new()
    assert said == [f"line {number}\n" for number in range(9990, 10_000)]


def test_a_new_attempt_is_announced(run: Path) -> None:
    attempt(run, 70)
    follow, said = follower(run)
    follow.print_new()
    attempt(run)
    say(run, 0, "again\n")
    follow.print_new()
    assert said == ["--- attempt 1\n", "--- attempt 2\n", "  0 | again\n"]


def test_a_replaced_or_emptied_log_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\n")
    tail = Tail(path)
    assert list(tail.lines()) == ["one"]
    with path.open("a") as old:
        os.rename(path, tmp_path / "log.1")
        path.write_text("three\n")
        old.write("two\n")
    assert list(tail.lines()) == ["two", "three"]
    path.write_text("4\n")
    assert list(tail.lines()) == ["4"]
    path.unlink()
    assert list(tail.lines()) == []


def test_a_follow_ends_when_the_run_has_ended_and_says_how(run: Path) -> None:
    number = attempt(run)
    hold(run)
    follow, said = follower(run)
    thread = threading.Thread(target=follow.run)
    thread.start()
    say(run, 0, "working\n")
    wait_until(lambda: "  0 | working\n" in said)
    assert thread.is_alive()
    say(run, 0, "last words\n")
    from kvm_dist.attempts import end_attempt

    end_attempt(run, number, 75)
    (run / "lock").unlink()
    thread.join(30)
    assert not thread.is_alive()
    assert said[-2:] == ["  0 | last words\n", "--- a stopped at step 0\n"]
