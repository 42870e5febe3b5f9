"""The training runs of a miniature campaign: each a `kvm-dist train` of one thread. No torch."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import FrameType

from kvm_dist.attempts import newest_step
from kvm_dist.config import RunConfig
from kvm_dist.exit_codes import CrashError, ExitCode, Preempted
from kvm_dist.load import load_config
from kvm_dist.miniature.grid import Grid, Trial, training_seconds
from kvm_dist.progress import duration

POLL_SECONDS = 0.2
SHOWN_LINES = 5


@dataclass(frozen=True)
class TrainingRun:
    """A trial with its configuration file, what is changed in it, and the result of both."""

    trial: Trial
    overrides: tuple[str, ...]
    config: RunConfig
    log: Path

    @property
    def tokens(self) -> int:
        train = self.config.train
        return train.steps * train.batch_sequences * self.config.data.sequence_length

    @property
    def is_trained(self) -> bool:
        return newest_step(self.config.run_directory) >= self.config.train.steps


def training_runs(grid: Grid) -> list[TrainingRun]:
    """The runs of a grid, in its order."""
    runs = []
    for trial in grid.trials:
        overrides = grid.overrides_of(trial)
        config = load_config(trial.config, overrides).config
        runs.append(TrainingRun(trial, overrides, config, grid.out / "logs" / f"{trial.name}.log"))
    return runs


def train_all(runs: list[TrainingRun], jobs: int, update: Callable[[str, float], None]) -> list[TrainingRun]:
    """Train what is not trained yet. `update`: told of the begin and of each end, and which share of all
    tokens is trained.

    Returns the runs that diverged, as loss or gradients were not finite: a result, too. Raises CrashError
    once a run has failed otherwise, Preempted if asked to stop; what was under way has then saved, and the
    same call goes on.
    """
    diverged: list[TrainingRun] = []
    waiting = [run for run in runs if not run.is_trained]
    pace = Pace([run for run in runs if run.is_trained])
    total = sum(run.tokens for run in runs)
    done = total - sum(run.tokens for run in waiting)
    if waiting:
        update(f"{len(waiting)} of {len(runs)} runs to train, {jobs} at a time", done / total)
    running: dict[int, tuple[TrainingRun, subprocess.Popen[bytes]]] = {}
    with _stopped_at_the_end(running):
        while waiting or running:
            while waiting and len(running) < jobs:
                process = _start(waiting[0])
                running[process.pid] = waiting.pop(0), process
            time.sleep(POLL_SECONDS)
            ended = [pid for pid, (_, process) in running.items() if process.poll() is not None]
            for pid in ended:
                run, process = running.pop(pid)
                if process.returncode == ExitCode.NOT_FINITE:
                    diverged.append(run)
                else:
                    _require_done(run, process.returncode)
                    pace.add(run)
                done += run.tokens
                end = "diverged" if run in diverged else "is trained"
                left = pace.left([*waiting, *(run for run, _ in running.values())], jobs)
                update(f"{run.trial.name} {end}{left}", done / total)
    return diverged


class Pace:
    """How long the runs to come will take: a model takes as long with every seed."""

    def __init__(self, trained: Iterable[TrainingRun]) -> None:
        self._seconds_per_token: dict[tuple[str, str], float] = {}
        for run in trained:
            self.add(run)

    def add(self, run: TrainingRun) -> None:
        """A run that has ended."""
        if seconds := training_seconds(run.config.run_directory):
            self._seconds_per_token[run.trial.task, run.trial.model] = seconds / run.tokens

    def left(self, runs: list[TrainingRun], jobs: int) -> str:
        """In words; models that were not seen yet count as the mean of those that were."""
        if not runs or not self._seconds_per_token:
            return ""
        usual = mean(self._seconds_per_token.values())
        seconds = [
            run.tokens * self._seconds_per_token.get((run.trial.task, run.trial.model), usual) for run in runs
        ]
        return f"; about {duration(max(*seconds, sum(seconds) / jobs))} of training left"


def _start(run: TrainingRun) -> "subprocess.Popen[bytes]":
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with open(run.log, "ab") as log:
        return subprocess.Popen(
            _command(run),
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches it once, through us
        )


def _command(run: TrainingRun) -> list[str]:
    return [sys.executable, "-P", "-m", "launch.cli", "train", str(run.trial.config), *run.overrides]


def _require_done(run: TrainingRun, code: int) -> None:
    if code:
        said = run.log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
        raise CrashError(
            f"the run {run.trial.name} ended with exit code {code}; what is trained is kept, and the same "
            f"command goes on. Its log, {run.log}, ends with\n" + "\n".join(said)
        )


@contextmanager
def _stopped_at_the_end(running: dict[int, tuple[TrainingRun, "subprocess.Popen[bytes]"]]) -> Iterator[None]:
    """Whatever ends the campaign: runs under way are asked to save, and waited for."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Preempted("stopped as asked; what is trained is saved, and the same command goes on")

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
