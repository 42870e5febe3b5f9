"""A run on this machine: starts the ranks, passes signals on, and ends them together. Imports no torch."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from kvm_dist.attempts import begin_attempt, current_attempt, end_attempt
from kvm_dist.config import ParallelConfig
from kvm_dist.data.first_use import ensure_prepared
from kvm_dist.exit_codes import ExitCode
from kvm_dist.hang import Hang, read_hang
from kvm_dist.load import load_config
from kvm_dist.postmortem import log_tail, write_postmortem
from kvm_dist.run_directory import RunDirectory, locked_run_directory
from launch.output import CopiedOutput, terminal_columns
from launch.silence import Silence
from launch.worker import LAUNCHER_PID
from parallel.placement import LOOPBACK

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0  # between the first failure and the kill of the ranks that are still there
HANG_GRACE_SECONDS = 0.5
KILL_SECONDS = 10.0  # of a killed process: one that a GPU's driver holds may never end
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)
STRAY_VARIABLES = ("GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")
SPEAKING_CODES = (
    ExitCode.CONFIG,
    ExitCode.DATA,
    ExitCode.STORAGE,
    ExitCode.NOT_FINITE,
    ExitCode.PREEMPTED,
    ExitCode.HANG,
)  # codes that say more than "it crashed"


def train_locally(config: Path, overrides: Sequence[str]) -> int:
    """Start data x sequence ranks of `config` here and wait for their end. Returns the run's exit code."""
    loaded = load_config(config, overrides)
    with locked_run_directory(loaded) as directory:
        ensure_prepared(
            loaded.config.data, loaded.config.model.vocab_size
        )  # before anybody waits for anybody
        arguments = [sys.executable, "-P", "-m", "launch.worker", str(config), *overrides]
        attempt = begin_attempt(directory.path, steps=loaded.config.train.steps)
        code = int(ExitCode.CRASH)
        try:
            code = run_ranks(arguments, loaded.config.parallel, directory)
        finally:
            end_attempt(directory.path, attempt.number, code)
        return code


def run_ranks(arguments: Sequence[str], parallel: ParallelConfig, directory: RunDirectory) -> int:
    """Run `arguments` once per rank until all have ended; the exit code speaks for all of them."""
    ranks: list[Rank] = []
    directory.postmortem_path.unlink(missing_ok=True)  # of an earlier attempt
    with _signals_forwarded(ranks) as stop:
        port = _free_port()
        try:
            for rank in range(parallel.world_size):
                ranks.append(_start(arguments, rank, parallel, port, directory))
            stop.send_again(ranks)
            silence = Silence(directory, len(ranks), parallel.timeout_seconds)
            return _supervise(ranks, stop, directory, silence)
        finally:
            for rank_process in ranks:
                rank_process.kill()


@dataclass
class Rank:
    """One process of the run."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int  # bytes that were in the log before
    output: CopiedOutput | None = None  # rank 0's only

    def send(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        try:
            self.process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            pid = self.process.pid
            print(f"kvm-dist: rank {self.number} (pid {pid}) does not end, though killed", file=sys.stderr)
        if self.output is not None:
            self.output.join(timeout_seconds=2)

    @property
    def signal_name(self) -> str | None:
        """What killed it, if a signal did."""
        code = self.process.returncode
        return signal.Signals(-code).name if code < 0 else None

    def ended_how(self) -> str:
        if self.signal_name:
            return f"was killed by {self.signal_name}"
        return f"ended with exit code {self.process.returncode}"


@dataclass
class StopState:
    """Which signals this process was sent and passed on."""

    received: list[int] = field(default_factory=list)

    @property
    def impatient(self) -> bool:
        return self.received.count(signal.SIGINT) > 1

    def send_again(self, ranks: Sequence[Rank]) -> None:
        """For ranks that started after the signal came."""
        for number in self.received:
            for rank in ranks:
                rank.send(number)

    def exit_code(self, rank: Rank) -> int:
        """A rank that dies by a signal we passed on had not begun to train: nothing is lost."""
        code = rank.process.returncode
        return int(ExitCode.PREEMPTED) if -code in self.received else code


def _supervise(ranks: Sequence[Rank], stop: StopState, directory: RunDirectory, silence: Silence) -> int:
    """Wait for all; after a failure give the others a moment to report, then kill them."""
    failed: list[Rank] = []
    deadline: float | None = None
    told = False
    while running := [rank for rank in ranks if rank.process.poll() is None]:
        failed += _newly_failed(ranks, failed)
        if not told and any(stop.exit_code(rank) == ExitCode.PREEMPTED for rank in failed):
            told = True
            for rank in running:  # one that has not begun would wait for the rank that has left
                rank.send(signal.SIGTERM)
        if deadline is None and any(stop.exit_code(rank) != ExitCode.PREEMPTED for rank in failed):
            hung = failed[-1].process.returncode == ExitCode.HANG  # all stacks are written by then
            grace = HANG_GRACE_SECONDS if hung else GRACE_SECONDS
            deadline = time.monotonic() + grace  # whoever is left waits for a rank that is gone
        if not failed and silence.found():
            break
        if stop.impatient or (deadline is not None and time.monotonic() > deadline):
            break
        time.sleep(POLL_SECONDS)
    failed += _newly_failed(ranks, failed)
    for rank in running:
        rank.kill()
    if silence.hang is not None:
        return _verdict_of_silence(ranks, silence.hang, directory)
    if stop.impatient and running:
        print("kvm-dist: second Ctrl-C: killed without a save; the last checkpoint stands", file=sys.stderr)
        return int(ExitCode.CRASH)
    return _verdict(ranks, failed, stop, directory)


def _newly_failed(ranks: Sequence[Rank], known: Sequence[Rank]) -> list[Rank]:
    ended = [rank for rank in ranks if rank not in known and rank.process.returncode]
    return sorted(ended, key=lambda rank: rank.process.returncode > 0)  # a killed rank before its mourners


def _verdict(ranks: Sequence[Rank], failed: Sequence[Rank], stop: StopState, directory: RunDirectory) -> int:
    """The exit code that speaks for all, and who is to blame, on stderr and in the postmortem."""
    if not failed:
        return int(ExitCode.DONE)
    speaking = [rank for rank in failed if stop.exit_code(rank) in SPEAKING_CODES]
    first = speaking[0] if speaking else failed[0]
    code = stop.exit_code(first) if speaking else int(ExitCode.CRASH)
    if code != ExitCode.PREEMPTED:
        _report(ranks, first, code, directory)
    return code


def _verdict_of_silence(ranks: Sequence[Rank], hang: Hang, directory: RunDirectory) -> int:
    """No rank could end by itself."""
    code = int(ExitCode.HANG)
    write_postmortem(directory, code, hang.cause, rank=hang.rank, ranks=len(ranks))
    print(f"kvm-dist: {hang.cause}; {_stacks_in_words(hang, directory)}", file=sys.stderr, flush=True)
    return code


def _stacks_in_words(hang: Hang, directory: RunDirectory) -> str:
    return f"stacks of {len(hang.stacks)} ranks in {directory.stacks}"


def _report(ranks: Sequence[Rank], first: Rank, code: int, directory: RunDirectory) -> None:
    """Who ended the run, on stderr and in the postmortem; after a hang the rank that was silent."""
    tail = log_tail(first.log, first.log_start)
    cause = f"rank {first.number} {first.ended_how()}"
    if first.signal_name is None and tail:
        cause += f": {tail[-1]}"  # as a rule the message of the error
    write_postmortem(
        directory,
        code,
        cause,
        rank=first.number,
        ranks=len(ranks),
        said=tail,
        signal=first.signal_name,
    )
    hang = read_hang(directory.stacks, current_attempt(directory.path)) if code == ExitCode.HANG else None
    shown = "".join(f"\n  | {line}" for line in tail)
    said = "" if first.number == 0 else f", which ends with{shown}"
    if hang is not None and hang.cause:
        said = f"; {hang.cause}; {_stacks_in_words(hang, directory)}"
    print(
        f"kvm-dist: rank {first.number} of {len(ranks)} {first.ended_how()}; its log: {first.log}{said}",
        file=sys.stderr,
        flush=True,
    )


def _start(
    arguments: Sequence[str], rank: int, parallel: ParallelConfig, port: int, directory: RunDirectory
) -> Rank:
    """Rank 0 writes to the terminal and its log, every other rank to its log only; logs grow over resumes."""
    log_path = directory.log_path(rank)
    output = CopiedOutput(log_path) if rank == 0 else None
    with open(log_path, "ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            arguments,
            env=_environment(rank, parallel, port),
            stdin=subprocess.DEVNULL,
            stdout=output.stdout if output else log,
            stderr=output.stderr if output else log,
            start_new_session=True,  # Ctrl-C reaches the ranks once, through us
        )
    if output:
        output.started()
    return Rank(rank, process, log_path, log_start, output)


def _environment(rank: int, parallel: ParallelConfig, port: int) -> dict[str, str]:
    size = parallel.world_size
    environment = {name: value for name, value in os.environ.items() if name not in STRAY_VARIABLES}
    threads = parallel.threads_per_rank or max(1, _cores() // size)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    return environment | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        **terminal_columns(environment),
        LAUNCHER_PID: str(os.getpid()),
    }


@contextmanager
def _signals_forwarded(ranks: Sequence[Rank]) -> Iterator[StopState]:
    """Send what we are sent to every rank. A closed terminal (SIGHUP) is a request to stop like SIGTERM."""
    stop = StopState()

    def forward(number: int, frame: FrameType | None) -> None:
        passed_on = signal.SIGTERM if number == signal.SIGHUP else number
        stop.received.append(passed_on)
        for rank in ranks:
            rank.send(passed_on)

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
