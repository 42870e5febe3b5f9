"""`kvm-dist stop`: ask a run to save and end, and wait until it has. Imports no torch."""

import os
import signal
import subprocess
import time
from pathlib import Path

from kvm_dist.attempts import STOP_MARKER, newest_step
from kvm_dist.exit_codes import ConfigError, CrashError, StorageError
from kvm_dist.run_directory import RunDirectory
from kvm_dist.run_lock import is_live, read_holder
from launch.status_queue import QueuedJob, queued_jobs
from launch.status_run import RunStatus, find_run, read_status

POLL_SECONDS = 0.5
_SCANCEL_SECONDS = 30.0


def stop_run(run: Path, run_root: Path, wait_seconds: float) -> None:
    """Ask, wait, and say which step was saved. Raises ConfigError if the run is not there to be asked."""
    path = find_run(run, run_root)
    queue = queued_jobs()
    status = read_status(path, queue)
    job = queue.get(status.job or "")
    if job is not None and (job.runs or job.waits):
        _stop_job(path, job)
    else:
        _stop_here(path)
    ended = _wait(path, wait_seconds)
    print(stopped_message(ended))


def stopped_message(status: RunStatus) -> str:
    saved = f"step {status.checkpoint} is saved" if status.checkpoint else "no step was saved"
    error = f" ({status.error})" if status.error else ""
    return f"{status.name} {status.state}{error}; {saved}; go on with: kvm-dist resume {status.path}"


def _stop_job(path: Path, job: QueuedJob) -> None:
    """The marker keeps the job from queueing itself again. Its ranks get the signal, its script does not."""
    try:
        (path / STOP_MARKER).write_text(time.strftime("%Y-%m-%d %H:%M:%S\n"))
    except OSError as error:
        raise StorageError(f"{path / STOP_MARKER} cannot be written: {error.strerror}") from error
    if job.waits:
        _scancel(job.number)
        print(f"job {job.number} has not begun: taken from the queue")
        return
    _scancel("--signal=USR2", job.number)
    print(f"job {job.number} was asked to save and stop")


def _scancel(*arguments: str) -> None:
    ended = subprocess.run(
        ["scancel", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=_SCANCEL_SECONDS,
    )
    if ended.returncode != 0:
        raise CrashError(f"scancel {' '.join(arguments)} failed: {ended.stderr.strip()}")


def _stop_here(path: Path) -> None:
    """The lock's holder is the launcher of local ranks, or rank 0: either passes the wish on to all."""
    holder = read_holder(RunDirectory(path).lock_path)
    if holder is None or is_live(holder) is False:
        raise ConfigError(f"{path}: the run is not running; see: kvm-dist status {path}")
    if is_live(holder) is None:
        raise ConfigError(
            f"{path}: the run is held by pid {holder.pid} on host {holder.host}, and is no job in Slurm's "
            "queue; call kvm-dist stop there"
        )
    try:
        os.kill(holder.pid, signal.SIGTERM)
    except PermissionError as error:
        raise ConfigError(
            f"{path}: pid {holder.pid} belongs to somebody else; ask them to stop it"
        ) from error
    except ProcessLookupError:
        return  # it has just ended
    print(f"pid {holder.pid} was asked to save and stop")


def _wait(path: Path, wait_seconds: float) -> RunStatus:
    deadline = time.monotonic() + wait_seconds
    while (status := read_status(path, queued_jobs())).live:
        if time.monotonic() > deadline:
            raise CrashError(
                f"{path}: still {status.state} {wait_seconds:g} s after it was asked to stop "
                f"({status.phase}); the newest checkpoint is of step {newest_step(path)}. Wait longer with "
                "--wait, or follow it with: kvm-dist logs --follow"
            )
        time.sleep(POLL_SECONDS)
    return status
