"""`stop` asks the right process, or Slurm, and says what was saved; `resume` starts the run as before."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvm_dist.attempts import STOP_MARKER, end_attempt, read_attempts
from kvm_dist.exit_codes import ConfigError, CrashError, NoProgress
from launch import local, resume
from launch.stop import stop_run
from tests.launch.run_samples import attempt, hold, submitted, write_run
from tests.launch.silent_ranks import wait_until

HOLDER = """
import signal, sys, time
from pathlib import Path
from kvm_dist.attempts import end_attempt
run = Path(sys.argv[1])
def leave(number, frame):
    if sys.argv[2] == "saves":
        end_attempt(run, 1, 75)
        sys.exit(75)
signal.signal(signal.SIGTERM, leave)
(run / "ready").touch()
while True:
    time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs", "a")


def start_holder(run: Path, what: str) -> "subprocess.Popen[bytes]":
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(run), what])
    wait_until((run / "ready").exists)
    attempt(run)
    hold(run, holder.pid)
    return holder


def test_a_local_run_is_asked_and_waited_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    holder = start_holder(run, "saves")
    stop_run(run, run.parent, wait_seconds=60)
    assert holder.wait(60) == 75
    asked, ended = capsys.readouterr().out.splitlines()
    assert asked == f"pid {holder.pid} was asked to save and stop"
    assert ended == f"a stopped; no step was saved; go on with: kvm-dist resume {run}"


def test_a_run_that_does_not_stop_in_time_is_said_to_go_on(run: Path) -> None:
    holder = start_holder(run, "stubborn")
    try:
        with pytest.raises(CrashError, match="still running 0 s after"):
            stop_run(run, run.parent, wait_seconds=0)
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.wait()


def test_what_does_not_run_here_cannot_be_stopped_here(run: Path) -> None:
    with pytest.raises(ConfigError, match="not running"):
        stop_run(run, run.parent, wait_seconds=0)
    attempt(run)
    hold(run, host="elsewhere")
    with pytest.raises(ConfigError, match="on host elsewhere"):
        stop_run(run, run.parent, wait_seconds=0)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands that answer from files: `state` is the job's, `asked` gets what scancel was given."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, script in (
        ("squeue", f'test -s {folder}/state && echo "17|$(cat {folder}/state)||None"; exit 0'),
        ("scancel", f'echo "$@" >> {folder}/asked; : > {folder}/state'),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o700 | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_a_job_gets_the_signal_and_the_wish_not_to_be_queued_again(run: Path, slurm: Path) -> None:
    submitted(run, "17", when=0.0)
    end_attempt(run, attempt(run, job="17"), 75)
    (slurm / "state").write_text("RUNNING")
    stop_run(run, run.parent, wait_seconds=10)
    assert (slurm / "asked").read_text() == "--signal=USR2 17\n"
    assert (run / STOP_MARKER).exists()


def test_a_job_that_waits_is_taken_from_the_queue(run: Path, slurm: Path) -> None:
    submitted(run, "17")
    (slurm / "state").write_text("PENDING")
    stop_run(run, run.parent, wait_seconds=10)
    assert (slurm / "asked").read_text() == "17\n"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, list[str], Path]]:
    calls: list[tuple[Path, list[str], Path]] = []

    def train(config: Path, overrides: list[str]) -> int:
        calls.append((config, overrides, Path.cwd()))
        return 0

    monkeypatch.setattr(local, "train_locally", train)
    monkeypatch.chdir(Path.cwd())  # put back afterwards
    return calls


def test_a_run_is_resumed_where_it_was_started(
    run: Path, tmp_path: Path, started: list[tuple[Path, list[str], Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    attempt(run, 75)
    monkeypatch.chdir(tmp_path)
    assert resume.resume_run(Path("a"), Path("runs"), ["data.workers=2"], here=False) == 0
    changes = [f"run_root={run.parent}", "name=a", "data.workers=2"]
    assert started == [(run / "config.yaml", changes, tmp_path / "home")]


def test_a_submitted_run_is_submitted_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from launch import submit

    calls: list[tuple[Path, list[str], bool]] = []

    def submit_run(config: Path, overrides: list[str], dry_run: bool) -> None:
        calls.append((config, overrides, dry_run))

    monkeypatch.setattr(submit, "submit_run", submit_run)
    monkeypatch.chdir(Path.cwd())  # put back afterwards
    submitted(run, "17")
    assert resume.resume_run(run, run.parent, [], here=False) == 0
    assert calls == [(run / "config.yaml", [f"run_root={run.parent}", "name=a"], False)]


def test_a_live_or_finished_run_is_not_resumed(
    run: Path, started: list[tuple[Path, list[str], Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(run)
    hold(run)
    with pytest.raises(ConfigError, match="kvm-dist stop"):
        resume.resume_run(run, run.parent, [], here=False)
    (run / "lock").unlink()
    end_attempt(run, 1, 0)
    assert resume.resume_run(run, run.parent, [], here=False) == 0
    assert "is finished" in capsys.readouterr().out
    assert started == []


def test_three_local_starts_without_a_checkpoint_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text(f"name: a\nrun_root: {tmp_path}/runs\n")
    monkeypatch.setattr(local, "ensure_prepared", lambda data, vocab_size: None)
    monkeypatch.setattr(local, "run_ranks", lambda arguments, parallel, directory: 70)
    for _ in range(3):
        assert local.train_locally(tmp_path / "run.yaml", []) == 70
    with pytest.raises(NoProgress) as refused:
        local.train_locally(tmp_path / "run.yaml", [])
    assert refused.value.code == 93
    assert [attempt.code for attempt in read_attempts(tmp_path / "runs/a")] == [70, 70, 70]
    assert not (tmp_path / "runs/a/lock").exists()
    assert local.train_locally(tmp_path / "run.yaml", []) == 70
