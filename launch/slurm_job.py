"""What a Slurm job runs on its first node: the ranks through srun, then the decision to go on. No torch.

    python -m launch.slurm_job SUBMISSION

The signal before a time limit and SIGTERM reach the ranks through Slurm itself; this process outlives them,
sees how they ended, and queues the job again where that leads on.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from kvm_dist.attempts import STOP_MARKER, begin_attempt, end_attempt, exit_code_after
from kvm_dist.data.first_use import ensure_prepared
from kvm_dist.exit_codes import CrashError, ExitCode
from kvm_dist.load import LoadedConfig, load_config
from kvm_dist.postmortem import log_tail, write_postmortem
from kvm_dist.run_directory import RunDirectory, locked_run_directory
from kvm_dist.slurm_queue import reached_its_limit
from kvm_dist.tracking.address import absolute_uri
from kvm_dist.tracking.tracker import URI_VARIABLE
from launch.ending import exit_code_of, leave
from launch.slurm_lead import lead_problem
from launch.slurm_step import Step, step_command
from launch.submit import SLURM_FOLDER, Submission, ranks_per_node

POLL_SECONDS = 0.2
LEAD_CHECK_SECONDS = 10.0
WORTH_ANOTHER_TRY = (ExitCode.CRASH, ExitCode.HANG)
TRACKING_SECONDS = 180.0  # for what the tracking store has not got when the job ends
PORTS = range(20_000, 32_000)
PORT_TRIES = 100
REQUEUED_SECONDS = 60.0  # how long Slurm may take to end this process after it queued the job again


class Termination:
    """Whether Slurm ends this job: at its limit, for another job, or because somebody cancelled it."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> "Termination":
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # meant for the ranks
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


def main() -> None:
    termination = Termination().install()
    submission = Submission.read(Path(sys.argv[1]))
    config = submission.configs[int(os.environ.get("SLURM_ARRAY_TASK_ID") or 0)]
    leave(exit_code_of(lambda: sys.exit(run_job(config, termination))))


def run_job(config: Path, termination: Termination) -> int:
    """One start of the job: returns what it shall exit with, unless it is queued again and ended by Slurm."""
    loaded = load_config(config)
    job = os.environ["SLURM_JOB_ID"]
    with locked_run_directory(loaded) as directory:
        code = _attempt(loaded, config, directory, job)
        code = exit_code_after(directory.path, code)
        stopped = (directory.path / STOP_MARKER).exists()
    why_not = reason_to_stay(code, _restarts(), loaded.config.slurm.requeues, stopped)
    if not why_not and termination.requested and not reached_its_limit(job):
        why_not = "it was cancelled, or had to go at once, in which case Slurm queues it again itself"
    if why_not:
        _send_what_tracking_missed(loaded)
        if code != ExitCode.DONE:
            _say(f"the job ends with code {code} and is not queued again: {why_not}")
        return code
    return _requeue(job, code, termination, directory.path)


def reason_to_stay(code: int, restarts: int, requeues: int, stopped: bool) -> str:
    """Why a job that ended with `code` is not queued again; empty if it shall be."""
    if code == ExitCode.DONE:
        return "it is done"
    if code != ExitCode.PREEMPTED and code not in WORTH_ANOTHER_TRY:
        return f"another try would end the same way ({ExitCode(code).name.lower()})"
    if stopped:
        return "it was asked to stop"
    if restarts >= requeues:
        return f"it was queued again {restarts} times already (slurm.requeues={requeues})"
    return ""


def _attempt(loaded: LoadedConfig, config: Path, directory: RunDirectory, job: str) -> int:
    """Run all ranks to their end; the exit code that speaks for them."""
    ensure_prepared(loaded.config.data, loaded.config.model.vocab_size)  # before anybody waits for anybody
    attempt = begin_attempt(directory.path, steps=loaded.config.train.steps, job=job)
    directory.postmortem_path.unlink(missing_ok=True)  # of an earlier attempt
    code = int(ExitCode.CRASH)
    try:
        ends = directory.path / SLURM_FOLDER / f"ends-{job}-{attempt.number}"
        ends.mkdir(mode=0o750)
        command = step_command(loaded.config, ranks_per_node(loaded.config), config, ends)
        step = Step(command, _environment(), ends, loaded.config.parallel.world_size)
        _wait(step, directory, loaded.config.slurm.lead_seconds)
        code = step.exit_code()
        if code not in (ExitCode.DONE, ExitCode.PREEMPTED):
            _report(step, code, directory, loaded.config.parallel.world_size)
        shutil.rmtree(ends)
    finally:
        end_attempt(directory.path, attempt.number, code)
    return code


def _environment() -> dict[str, str]:
    """Rank 0 runs on this node: a port that is free here is free for it."""
    port = os.environ.get("MASTER_PORT", str(free_port()))
    return {**os.environ, "MASTER_PORT": port, "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """Below those that connections to the outside take theirs from: free until rank 0 has imported, too."""
    for _ in range(PORT_TRIES):
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", port))
            return port
    raise CrashError(
        f"none of {PORT_TRIES} ports of {PORTS.start} to {PORTS.stop - 1} is free; set MASTER_PORT"
    )


def _wait(step: Step, directory: RunDirectory, lead_seconds: int) -> None:
    """Until all ranks have ended; once a save is measured, say if it would not fit before the limit."""
    next_check = time.monotonic()
    while step.running():
        if time.monotonic() >= next_check:
            next_check = time.monotonic() + LEAD_CHECK_SECONDS
            if problem := lead_problem(directory.metrics_path, lead_seconds):
                _say(problem)
                next_check = float("inf")
        time.sleep(POLL_SECONDS)


def _report(step: Step, code: int, directory: RunDirectory, ranks: int) -> None:
    rank, how = step.first_failure(code)
    log = directory.log_path(rank)
    tail = log_tail(log) if log.exists() else []
    shown = "".join(f"\n  | {line}" for line in tail)
    _say(f"rank {rank} of {ranks} {how}; its log: {log}, which ends with{shown}")
    write_postmortem(directory, code, f"rank {rank} {how}", rank=rank, ranks=ranks, said=tail)


def _send_what_tracking_missed(loaded: LoadedConfig) -> None:
    """The process that feeds the store ends with its rank's step: a slow store has not got all then."""
    config = loaded.config
    if not config.tracking.enabled:
        return
    command = [sys.executable, "-m", "kvm_dist.tracking", str(config.run_directory.absolute()), "--take-over"]
    environment = {**os.environ, URI_VARIABLE: absolute_uri(config.tracking_uri)}
    try:
        ended = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, timeout=TRACKING_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        _say("the tracking store did not answer in time; it gets the rest at the next start")
    else:
        if ended.returncode != 0:
            _say("the tracking store has not got everything; it gets the rest at the next start")


def _restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _requeue(job: str, code: int, termination: Termination, run_dir: Path) -> int:
    """Leaves at the SIGTERM that a requeue brings: until then it is not under way, after it Slurm waits."""
    _say(f"code {code}: the job is queued again and goes on from its last checkpoint")
    termination.requested = False
    if problem := _ask_to_requeue(job):
        _say(
            f"Slurm does not queue it again ({problem}); go on, on a login node, with: "
            f"kvm-dist resume {run_dir}"
        )
        return code
    deadline = time.monotonic() + REQUEUED_SECONDS
    while not termination.requested and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return code


def _ask_to_requeue(job: str) -> str:
    """What keeps Slurm from it; empty if nothing does. Some clusters have no scontrol on their nodes."""
    command = ["scontrol", "requeue", job]
    try:
        asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return asked.stderr.strip() or f"scontrol ended with {asked.returncode}" if asked.returncode else ""


def _say(text: str) -> None:
    print(f"kvm-dist: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
