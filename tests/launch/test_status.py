"""`status` tells from run directories and Slurm's queue what every run does."""

import json
import os
import stat
import time
from pathlib import Path

import pytest

from kvm_dist.exit_codes import ConfigError
from kvm_dist.postmortem import write_postmortem
from kvm_dist.run_directory import RunDirectory
from launch.status import show_status
from launch.status_queue import QueuedJob, queued_jobs
from launch.status_run import RunStatus, find_run, find_runs, read_status
from tests.launch.run_samples import attempt, beat, hold, submitted, take_steps, write_run
from tests.test_architecture import run_without_torch

NOBODY = 2**22 + 1  # no process has this number


def status(path: Path, *jobs: QueuedJob) -> RunStatus:
    return read_status(path, {job.number: job for job in jobs})


def test_a_run_that_goes_on_is_running_with_pace_and_time_left(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a", steps=100)
    take_steps(run, 1, 20, seconds=2.0)
    number = attempt(run)
    hold(run)
    beat(run, 0, number, 21, "forward")
    beat(run, 1, number, 21, "data")
    found = status(run)
    assert (found.state, found.step, found.steps, found.attempt) == ("running", 20, 100, 1)
    assert found.loss == pytest.approx(0.5)
    assert found.eta_seconds == pytest.approx(160.0, rel=0.01)
    assert found.phase in ("data of step 21", "forward of step 21")
    assert found.nodes == (os.uname().nodename,)
    assert found.live


def test_a_pause_between_attempts_is_no_pace(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a", steps=100)
    take_steps(run, 1, 10, seconds=1000.0)
    take_steps(run, 11, 20, seconds=2.0, restarts=1)
    attempt(run)
    hold(run)
    assert status(run).eta_seconds == pytest.approx(160.0, rel=0.01)


@pytest.mark.parametrize(
    ("code", "state"), [(0, "finished"), (75, "stopped"), (71, "hung"), (70, "crashed"), (65, "crashed")]
)
def test_how_the_last_attempt_ended_is_the_state(tmp_path: Path, code: int, state: str) -> None:
    run = write_run(tmp_path, "a")
    attempt(run, code)
    assert status(run).state == state


def test_a_launcher_that_was_killed_leaves_a_crashed_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a")
    attempt(run)
    hold(run, pid=NOBODY)
    found = status(run)
    assert (found.state, found.live) == ("crashed", False)
    assert "without a word" in found.error


def test_the_last_error_names_cause_and_tries(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a")
    for _ in range(2):
        attempt(run, 70)
    write_postmortem(RunDirectory(run), 70, "rank 3 was killed by SIGKILL", rank=3, ranks=4)
    error = status(run).error
    assert error == "crash (70): rank 3 was killed by SIGKILL; 2 tries without a new checkpoint"


def test_silent_ranks_of_a_live_run_look_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path, "a")
    number = attempt(run)
    hold(run)
    beat(run, 0, number, 1, "backward")
    assert status(run).state == "running"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 601)
    assert status(run).state == "hung?"


def test_a_holder_on_another_host_lives_while_its_ranks_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, "a")
    number = attempt(run)
    hold(run, host="elsewhere")
    beat(run, 0, number, 1, "backward")
    assert status(run).state == "running"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 601)
    assert status(run).state == "crashed"


def test_a_waiting_job_is_queued_or_requeued(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a")
    submitted(run, "17")
    assert status(run, QueuedJob("17", "PENDING")).state == "queued"
    attempt(run, 70, job="17")
    assert status(run, QueuedJob("17", "PENDING")).state == "requeued"
    assert status(run, QueuedJob("17", "RUNNING")).state == "running"
    assert status(run, QueuedJob("17", "FAILED")).state == "crashed"
    assert status(run, QueuedJob("18", "RUNNING")).state == "crashed"


def test_a_job_that_waits_for_what_does_not_come_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a")
    submitted(run, "17")
    assert status(run, QueuedJob("17", "PENDING", "", "Priority")).error == ""
    assert (
        status(run, QueuedJob("17", "PENDING", "", "PartitionTimeLimit")).error == "waits: PartitionTimeLimit"
    )
    assert status(run, QueuedJob("17", "RUNNING", "node1", "PartitionTimeLimit")).error == ""


def test_the_job_of_an_older_submission_is_not_that_of_a_local_attempt(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a")
    submitted(run, "17", when=time.time() - 100)
    attempt(run, 75)
    assert status(run, QueuedJob("17", "PENDING")).state == "stopped"


def test_the_queue_is_asked_once_and_without_accounting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(
        '#!/bin/sh\necho "$@" >&2\nprintf "17|RUNNING|node[1-2]|None\\n18_3|PENDING||Priority\\n"\n'
    )
    squeue.chmod(squeue.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    jobs = queued_jobs()
    assert jobs["17"].runs
    assert jobs["18_3"] == QueuedJob("18_3", "PENDING", "", "Priority")
    monkeypatch.setenv("PATH", str(tmp_path / "absent"))
    assert queued_jobs() == {}


def test_runs_of_sweeps_are_found_too(tmp_path: Path) -> None:
    write_run(tmp_path, "b")
    write_run(tmp_path / "sweep", "a")
    (tmp_path / "notes").mkdir()
    assert [path.name for path in find_runs(tmp_path)] == ["b", "a"]


def test_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "here")
    assert find_run(Path("here"), tmp_path) == tmp_path / "here"
    with pytest.raises(ConfigError, match="kvm-dist status"):
        find_run(Path("gone"), tmp_path)
    with pytest.raises(ConfigError, match="--run-root"):
        find_runs(tmp_path / "absent")


def test_the_table_has_a_line_a_run_and_json_has_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = write_run(tmp_path, "first", steps=40), write_run(tmp_path, "second")
    take_steps(first, 1, 40)
    attempt(first, 0)
    attempt(second, 70)
    write_postmortem(RunDirectory(second), 70, "rank 1 was killed by SIGKILL", rank=1, ranks=2)
    show_status(None, tmp_path, as_json=False)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "run",
        "state",
        "step",
        "loss",
        "tok/s",
        "ETA",
        "node",
        "attempt",
        "last",
        "error",
    ]
    assert lines[0].split() == ["first", "finished", "40/40", "0.2500", "1.5K", "1"]
    assert lines[1].split(maxsplit=4)[:4] == ["second", "crashed", "0/100", "1"]
    assert "rank 1 was killed by SIGKILL" in lines[1]
    show_status(None, tmp_path, as_json=True)
    records = json.loads(capsys.readouterr().out)
    assert [(record["name"], record["state"]) for record in records] == [
        ("first", "finished"),
        ("second", "crashed"),
    ]
    show_status(Path("second"), tmp_path, as_json=True)
    assert json.loads(capsys.readouterr().out)["postmortem"]["rank"] == 1


def test_one_run_in_detail_shows_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, "a")
    number = attempt(run)
    hold(run)
    for rank in (0, 1):
        beat(run, rank, number, 7, "backward")
    show_status(run, tmp_path, as_json=False)
    out = capsys.readouterr().out
    assert "state       running, backward of step 7" in out
    assert [line.split()[0] for line in out.splitlines()[-2:]] == ["0", "1"]


def test_status_and_logs_need_no_torch(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs", "a")
    attempt(run, 0)
    (run / "logs/rank-00000.log").write_text("a line\n")
    for arguments in (["status"], ["status", "a"], ["logs", "a"], ["resume", "a"]):
        ended = run_without_torch(tmp_path, *arguments)
        assert ended.returncode == 0, ended.stderr
    assert run_without_torch(tmp_path, "stop", "a").returncode == 64
