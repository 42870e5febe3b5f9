"""A real run under signals, timed by its heartbeats."""

import signal
from pathlib import Path

import pytest

from kvm_dist.attempts import read_attempts
from kvm_dist.heartbeat import read_beats
from tests.launch.silent_ranks import wait_until
from tests.launch.tiny_run import TinyRun, write_corpus

LONG = ["train.steps=100000", "checkpoint.every_steps=100000", "evaluation.every_steps=100000"]


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    write_corpus(tmp_path)
    return TinyRun(tmp_path / "root", tmp_path)


def test_a_second_signal_while_the_ranks_save_changes_nothing(run: TinyRun) -> None:
    process = run.start(LONG)
    wait_until(lambda: run.last_step() >= 2)
    process.send_signal(signal.SIGUSR2)

    def saves() -> bool:
        return process.poll() is not None or any(
            beat.phase == "save" for beat in read_beats(run.directory / "heartbeats")
        )

    wait_until(saves)
    for number in (signal.SIGUSR2, signal.SIGTERM):
        process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    (checkpoint,) = (run.directory / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{run.last_step():08d}"
    assert (checkpoint / "manifest.json").exists()
    assert [attempt.code for attempt in read_attempts(run.directory)] == [75]
