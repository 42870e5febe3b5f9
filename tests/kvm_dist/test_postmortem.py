"""`postmortem.json` tells of the rank to blame, not of those that mourn it."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvm_dist.attempts import begin_attempt, read_attempts
from kvm_dist.exit_codes import ExitCode
from kvm_dist.heartbeat import Heartbeat
from kvm_dist.postmortem import log_tail, record_end, write_postmortem
from kvm_dist.run_directory import RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    (tmp_path / "logs").mkdir()
    begin_attempt(tmp_path)
    return RunDirectory(tmp_path)


def read(directory: RunDirectory) -> Any:
    return json.loads(directory.postmortem_path.read_text())


def test_it_says_where_the_rank_was_and_what_it_said_last(directory: RunDirectory) -> None:
    heartbeat = Heartbeat(directory.heartbeats, 1, attempt=1)
    heartbeat.begin_step(7)
    heartbeat.beat("optimizer")
    directory.log_path(1).write_text("".join(f"line {number}\n" for number in range(40)))
    write_postmortem(directory, 70, "rank 1 was killed by SIGKILL", rank=1, ranks=2, signal="SIGKILL")
    found = read(directory)
    assert (found["rank"], found["step"], found["phase"]) == (1, 7, "optimizer")
    assert (found["exit_code"], found["meaning"], found["signal"]) == (70, "crash", "SIGKILL")
    assert (found["attempt"], found["ranks"], found["stacks"]) == (1, 2, [])
    assert found["last_lines"] == [f"line {number}" for number in range(25, 40)]
    assert [beat["phase"] for beat in found["heartbeats"]] == ["optimizer"]


def test_the_first_end_of_an_attempt_stays_and_the_next_attempt_has_its_own(directory: RunDirectory) -> None:
    record_end(directory, ExitCode.DATA, "a shard is damaged", rank=1, ranks=2)
    record_end(directory, ExitCode.CRASH, "connection closed by peer", rank=0, ranks=2)
    assert (read(directory)["rank"], read(directory)["exit_code"]) == (1, 65)
    assert [attempt.code for attempt in read_attempts(directory.path)] == [65]
    begin_attempt(directory.path)
    record_end(directory, ExitCode.CRASH, "again", rank=0, ranks=2)
    assert (read(directory)["attempt"], read(directory)["cause"]) == (2, "again")


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.PREEMPTED])
def test_a_good_end_leaves_none(directory: RunDirectory, code: ExitCode) -> None:
    record_end(directory, code, "")
    assert not directory.postmortem_path.exists()
    assert [attempt.code for attempt in read_attempts(directory.path)] == [code]


def test_only_what_this_attempt_said_is_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("new\n")
    assert log_tail(log, start) == ["new"]
    assert log_tail(tmp_path / "absent") == []
