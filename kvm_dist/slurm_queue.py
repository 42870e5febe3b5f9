"""What Slurm's queue says of jobs, without accounting. Imports no torch."""

import subprocess

QUERY_SECONDS = 20.0
ENDED = ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "PREEMPTED")


def job_state(job: str) -> str | None:
    """Slurm's word for the state of `job`, "" if it knows none of that number, None if it does not answer."""
    return _asked(job, "%T")


def reached_its_limit(job: str) -> bool:
    """Whether Slurm ends `job` at its time limit, and not because somebody or something else wants it to."""
    return _asked(job, "%r") == "TimeLimit"


def job_is_alive(job: str) -> bool | None:
    """Whether processes of `job` may be running now; None if Slurm does not answer."""
    state = job_state(job)
    return None if state is None else state not in ("", *ENDED, *WAITING)


def ask_queue(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    """What squeue answers to `arguments`, without a headline; None if it is not there or takes too long."""
    try:
        return subprocess.run(
            ["squeue", "--noheader", *arguments],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=QUERY_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _asked(job: str, field: str) -> str | None:
    ended = ask_queue("--states=all", f"--jobs={job}", f"--format={field}")
    if ended is None:
        return None
    if ended.returncode != 0:
        return "" if "Invalid job id" in ended.stderr else None
    return next(iter(ended.stdout.split()), "")
