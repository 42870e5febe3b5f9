"""A launcher and ranks that beat like a training run, without torch: for tests of what happens in a hang."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Its name is that of the trainer's file, so that its thread counts as the one that trains.
RANK = """
import os, re, sys, time
from pathlib import Path
from kvm_dist.attempts import current_attempt
from kvm_dist.run_directory import RunDirectory
from kvm_dist.watchdog import watched
from launch.worker import end_with_the_launcher

def loop_for_ever():
    while True:
        pass

def main():
    end_with_the_launcher()
    rank, ranks, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), float(sys.argv[1])
    what = sys.argv[2 + rank]
    directory = RunDirectory(Path("runs/r"))
    with watched(directory, rank, ranks, current_attempt(directory.path), timeout) as heartbeat:
        heartbeat.begin_step(1)
        heartbeat.beat("forward")
        heartbeat.beat("backward")
        heartbeat.begin_step(2)
        if what == "loop":
            loop_for_ever()
        if what == "hold":
            re.match("(a+)+$", "a" * 64 + "b")  # holds the interpreter's lock for longer than anybody lives
        heartbeat.beat("forward")
        Path(f"ready-{rank}").write_text(str(os.getpid()))
        if what == "wait":
            time.sleep(600)

main()
"""

LAUNCH = """
import sys
from kvm_dist.attempts import begin_attempt
from kvm_dist.load import load_config
from kvm_dist.run_directory import locked_run_directory
from launch.ending import exit_code_of, leave
from launch.local import run_ranks

def launch():
    timeout, *ranks = sys.argv[1:]
    layout = [f"parallel.data={len(ranks)}", f"parallel.timeout_seconds={timeout}"]
    loaded = load_config("run.yaml", [*layout, "train.batch_sequences=12"])
    with locked_run_directory(loaded) as directory:
        begin_attempt(directory.path)
        command = [sys.executable, "trainer.py", timeout, *ranks]
        sys.exit(run_ranks(command, loaded.config.parallel, directory))

leave(exit_code_of(launch))
"""


def start(folder: Path, timeout: float, *ranks: str) -> "subprocess.Popen[str]":
    """One rank a word: "wait" for others, "loop" in the data, "hold" the interpreter, or "end"."""
    (folder / "trainer.py").write_text(RANK)
    (folder / "launch_ranks.py").write_text(LAUNCH)
    (folder / "run.yaml").write_text("name: r\n")
    return subprocess.Popen(
        [sys.executable, "launch_ranks.py", str(timeout), *ranks],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 150
    while not true():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.02)
