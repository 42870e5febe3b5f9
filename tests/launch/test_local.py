"""A local run: ranks start, are heard, and end together, with one exit code for all."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.local import Rank

RANK = """
import os, signal, sys, time
from launch.worker import end_with_the_launcher
end_with_the_launcher()
rank = int(os.environ["RANK"])
what = sys.argv[1 + rank]
print(f"rank {rank} says {what}", flush=True)
print(f"rank {rank} complains", file=sys.stderr, flush=True)
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "env":
    names = "WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS GROUP_RANK"
    print({name: os.environ.get(name) for name in names.split()})
    sys.exit(0)
if what in ("save", "stubborn"):
    def note(number, frame):
        print(f"rank {rank} got {signal.Signals(number).name}", flush=True)
        if what == "save":
            os._exit(75)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, note)
if what in ("save", "stubborn", "sleep"):
    open(f"ready-{rank}", "w").write(str(os.getpid()))
    while True:
        time.sleep(60)
sys.exit(int(what))
"""

LAUNCH = """
import sys
from launch.local import run_ranks
from launch.ending import exit_code_of, leave
from kvm_dist.load import load_config
from kvm_dist.run_directory import locked_run_directory

def launch():
    loaded = load_config("run.yaml", [f"parallel.data={len(sys.argv) - 1}"])
    with locked_run_directory(loaded) as directory:
        sys.exit(run_ranks([sys.executable, "rank.py", *sys.argv[1:]], loaded.config.parallel, directory))

leave(exit_code_of(launch))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    (tmp_path / "launch_ranks.py").write_text(textwrap.dedent(LAUNCH))
    (tmp_path / "run.yaml").write_text("name: r\n")
    return tmp_path


def start(folder: Path, *ranks: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "launch_ranks.py", *ranks],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.02)


def pids(folder: Path, count: int) -> list[int]:
    """The ranks' process ids, once all are up."""
    files = [folder / f"ready-{rank}" for rank in range(count)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def log(folder: Path, rank: int) -> str:
    return (folder / f"runs/r/logs/rank-{rank:05d}.log").read_text()


def test_a_run_of_which_all_ranks_end_well_ends_well(folder: Path) -> None:
    code, out, err = finish(start(folder, "0", "0"))
    assert (code, out) == (0, "rank 0 says 0\n")
    assert err == "rank 0 complains\n"
    assert not (folder / "runs/r/lock").exists()


def test_every_rank_has_a_log_that_grows_over_resumes(folder: Path) -> None:
    for _ in range(2):
        assert finish(start(folder, "0", "0"))[0] == 0
    assert sorted(log(folder, 0).splitlines()) == ["rank 0 complains"] * 2 + ["rank 0 says 0"] * 2
    assert log(folder, 1) == "rank 1 says 0\nrank 1 complains\n" * 2


def test_ranks_are_told_who_they_are_and_share_the_cores(folder: Path) -> None:
    code, out, _ = finish(start(folder, "env", "env", GROUP_RANK="7"))
    assert code == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert "'WORLD_SIZE': '2', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1'" in out
    assert f"'OMP_NUM_THREADS': '{threads}', 'GROUP_RANK': None" in out
    assert "'OMP_NUM_THREADS': '5'" in finish(start(folder, "env", OMP_NUM_THREADS="5"))[1]


def test_a_killed_rank_takes_the_others_with_it_and_is_named(folder: Path) -> None:
    process = start(folder, "sleep", "kill")
    (other, *_) = pids(folder, 1)
    code, _, err = finish(process)
    assert code == 70
    assert "rank 1 of 2 was killed by SIGKILL; its log: runs/r/logs/rank-00001.log" in err
    assert "| rank 1 says kill" in err
    assert is_gone(other)
    postmortem = json.loads((folder / "runs/r/postmortem.json").read_text())
    assert (postmortem["exit_code"], postmortem["meaning"], postmortem["rank"]) == (70, "crash", 1)
    assert postmortem["cause"] == "rank 1 was killed by SIGKILL"
    assert "rank 1 says kill" in postmortem["last_lines"]
    assert finish(start(folder, "0", "0"))[0] == 0
    assert not (folder / "runs/r/postmortem.json").exists()


@pytest.mark.parametrize("code", [64, 65, 71, 74, 76])
def test_the_code_of_a_rank_that_says_why_wins(folder: Path, code: int) -> None:
    found, _, err = finish(start(folder, "70", str(code)))
    assert found == code
    assert f"rank 1 of 2 ended with exit code {code}" in err


def test_an_undocumented_code_is_a_crash(folder: Path) -> None:
    code, _, err = finish(start(folder, "0", "3"))
    assert code == 70
    assert "rank 1 of 2 ended with exit code 3" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_request_to_stop_reaches_every_rank_and_the_save_is_waited_for(folder: Path, number: int) -> None:
    process = start(folder, "save", "save")
    pids(folder, 2)
    process.send_signal(number)
    code, out, err = finish(process)
    name = signal.Signals(number).name
    assert code == 75
    assert f"rank 0 got {name}" in out
    assert f"rank 1 got {name}" in log(folder, 1)
    assert "exit code" not in err


def test_a_closed_terminal_is_a_request_to_stop(folder: Path) -> None:
    process = start(folder, "save")
    pids(folder, 1)
    process.send_signal(signal.SIGHUP)
    code, out, _ = finish(process)
    assert (code, "rank 0 got SIGTERM" in out) == (75, True)


def test_a_rank_that_was_stopped_alone_takes_the_others_along(folder: Path) -> None:
    process = start(folder, "save", "save")
    (_, second) = pids(folder, 2)
    os.kill(second, signal.SIGUSR2)
    code, out, _ = finish(process)
    assert code == 75
    assert "rank 0 got SIGTERM" in out


def test_a_second_interrupt_kills(folder: Path) -> None:
    process = start(folder, "stubborn", "stubborn")
    ranks = pids(folder, 2)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "rank 1 got SIGINT" in log(folder, 1))
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 70
    assert "killed without a save" in err
    assert all(map(is_gone, ranks))


def test_a_rank_stopped_before_it_could_train_lost_nothing(folder: Path) -> None:
    process = start(folder, "sleep")
    pids(folder, 1)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 75


def test_ranks_end_when_the_launcher_is_killed_and_the_next_launch_takes_over(folder: Path) -> None:
    process = start(folder, "stubborn", "stubborn")
    ranks = pids(folder, 2)
    process.kill()
    process.wait()
    wait_until(lambda: all(map(is_gone, ranks)))
    assert (folder / "runs/r/lock").exists()
    assert finish(start(folder, "0", "0"))[0] == 0


def test_a_second_launch_of_a_live_run_is_refused(folder: Path) -> None:
    process = start(folder, "save")
    pids(folder, 1)
    code, _, err = finish(start(folder, "0"))
    assert code == 64
    assert f"pid {process.pid} on this host" in err
    process.terminate()
    assert finish(process)[0] == 75


class Held:
    """A process that a driver holds: a GPU that has fallen off its bus answers nobody."""

    pid, returncode = 4242, None

    def __init__(self) -> None:
        self.sent: list[int] = []

    def poll(self) -> None:
        return None

    def send_signal(self, number: int) -> None:
        self.sent.append(number)

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "it never ends"
        raise subprocess.TimeoutExpired("rank", timeout)


def test_a_rank_that_cannot_be_killed_is_named_and_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process: Any = Held()
    Rank(3, process, tmp_path / "log", 0).kill()
    assert process.sent == [signal.SIGKILL]
    assert "rank 3 (pid 4242) does not end, though killed" in capsys.readouterr().err


def test_a_worker_whose_launcher_is_gone_already_ends_at_once() -> None:
    program = "from launch.worker import end_with_the_launcher; end_with_the_launcher(); print('went on')"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"KVM_DIST_LAUNCHER_PID": "1"},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (1, "")


def test_a_signal_before_training_ends_a_worker_as_preempted() -> None:
    program = (
        "import os, signal; from launch.worker import leave_quietly_until_training; "
        "leave_quietly_until_training(); os.kill(os.getpid(), signal.SIGTERM); print('went on')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (75, "")
    assert "SIGTERM before training began" in ended.stderr
