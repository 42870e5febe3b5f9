"""What a run directory says of its run, read in a few milliseconds. Imports no torch and no configuration.

Hundreds of runs are looked at in one go, so only the ends of files are read, and `config.yaml` by a pattern.
"""

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvm_dist.attempts import Attempt, newest_step, read_attempts, tries_without_checkpoint
from kvm_dist.exit_codes import ConfigError, ExitCode
from kvm_dist.heartbeat import Beat, read_beats
from kvm_dist.metrics import parse_metrics
from kvm_dist.postmortem import read_postmortem
from kvm_dist.run_directory import RunDirectory
from kvm_dist.run_lock import is_live, read_holder
from launch.status_queue import QueuedJob

_TAIL_BYTES = 16384  # some tens of logged steps
_STEPS = re.compile(r"^train:\n(?:  .*\n)*?  steps: (\d+)$", re.MULTILINE)
_TIMEOUT = re.compile(r"^parallel:\n(?:  .*\n)*?  timeout_seconds: ([\d.]+)$", re.MULTILINE)
_ENDS = {
    ExitCode.DONE: "finished",
    ExitCode.PREEMPTED: "stopped",
    ExitCode.HANG: "hung",
    ExitCode.NO_PROGRESS: "no progress",
}
_PASSING_REASONS = ("", "None", "Priority", "Resources", "BeginTime", "Dependency", "JobArrayTaskLimit")
LIVE_STATES = ("running", "hung?", "queued", "requeued")


@dataclass(frozen=True)
class RunStatus:
    """One run. step: applied and logged; phase: of the rank furthest behind; None: not known."""

    name: str
    path: Path
    state: str
    step: int
    steps: int | None
    loss: float | None
    tokens_per_second: float | None
    eta_seconds: float | None
    nodes: tuple[str, ...]
    attempt: int
    error: str
    phase: str
    checkpoint: int
    updated: float | None
    job: str | None

    @property
    def live(self) -> bool:
        return self.state in LIVE_STATES


def find_runs(run_root: Path) -> list[Path]:
    """The run directories under `run_root`, by name; those of sweeps lie one level deeper."""
    found = []
    try:
        folders = sorted(path for path in run_root.iterdir() if path.is_dir())
    except OSError as error:
        raise ConfigError(
            f"{run_root}: {error.strerror}; give the folder of your runs: --run-root"
        ) from error
    for folder in folders:
        if is_run(folder):
            found.append(folder)
        else:
            found += sorted(path.parent for path in folder.glob("*/config.yaml") if is_run(path.parent))
    return found


def find_run(run: Path, run_root: Path) -> Path:
    """The directory of `run`: a path, or a name under `run_root`. Raises ConfigError if there is none."""
    for path in (run, run_root / run):
        if is_run(path):
            return path
    raise ConfigError(f"{run}: no run directory, nor is {run_root / run}; see them with: kvm-dist status")


def is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "logs").is_dir()


def read_status(path: Path, queue: Mapping[str, QueuedJob]) -> RunStatus:
    """The state of the run in `path`; `queue`: Slurm's jobs by number, empty where there is no Slurm."""
    directory = RunDirectory(path)
    config = _config_text(directory)
    attempts = read_attempts(path)
    metrics = _last_metrics(directory.metrics_path)
    beats = read_beats(directory.heartbeats, attempts[-1].number) if attempts else []
    job = _job_number(directory, attempts)
    steps = _number(_STEPS, config)
    step = int(metrics[-1]["step"]) if metrics else 0
    timeout = _number(_TIMEOUT, config) or 600.0
    state = _state(directory, attempts, beats, queue.get(job or ""), step, steps, timeout)
    last = metrics[-1] if metrics else {}
    behind = min(beats, key=lambda beat: (beat.count, beat.rank), default=None)
    return RunStatus(
        name=path.name,
        path=path,
        state=state,
        step=step,
        steps=None if steps is None else int(steps),
        loss=last.get("train/loss"),
        tokens_per_second=last.get("perf/tokens_per_second"),
        eta_seconds=_eta(metrics, steps) if state == "running" else None,
        nodes=tuple(dict.fromkeys(beat.host for beat in beats)),
        attempt=attempts[-1].number if attempts else 0,
        error=_error(directory, state, attempts) or _why_it_waits(queue.get(job or "")),
        phase=f"{behind.phase} of step {behind.step}" if behind and state in ("running", "hung?") else "",
        checkpoint=newest_step(path),
        updated=max([beat.time for beat in beats] + ([last["time"]] if last else []), default=None),
        job=job,
    )


def _state(
    directory: RunDirectory,
    attempts: list[Attempt],
    beats: list[Beat],
    queued: QueuedJob | None,
    step: int,
    steps: float | None,
    timeout: float,
) -> str:
    """What Slurm says, else what the lock says, else how the last attempt ended."""
    if queued is not None and queued.waits:
        return "requeued" if attempts else "queued"
    if (queued is not None and queued.runs) or _is_held(directory, beats, timeout):
        starts = attempts and attempts[-1].code is not None  # the beats are of the attempt before
        silent = beats and not starts and time.time() - max(beat.time for beat in beats) > timeout
        return "hung?" if silent and beats[0].phase not in ("start", "end", "evaluate", "save") else "running"
    code = attempts[-1].code if attempts else None
    if code is not None:
        return _ENDS.get(ExitCode(code), "crashed") if code in set(ExitCode) else "crashed"
    if steps is not None and step >= steps:
        return "finished"
    return "crashed" if attempts else ("stopped" if step else "new")


def _is_held(directory: RunDirectory, beats: list[Beat], timeout: float) -> bool:
    """Of a holder on another host only the beats can tell."""
    holder = read_holder(directory.lock_path)
    if holder is None:
        return False
    live = is_live(holder)
    if live is None:
        return bool(beats) and time.time() - max(beat.time for beat in beats) < timeout
    return live


def _error(directory: RunDirectory, state: str, attempts: list[Attempt]) -> str:
    if state in ("finished", "stopped", "new"):
        return ""
    record = read_postmortem(directory)
    if record is not None and "cause" in record:
        meaning, code = record.get("meaning", ""), record.get("exit_code")
        said = f"{meaning} ({code}): {record['cause']}"
    elif state == "crashed":
        said = "ended without a word (killed, or its machine went down)"
    else:
        return ""
    tries = tries_without_checkpoint(directory.path)
    return said + (f"; {tries} tries without a new checkpoint" if tries > 1 and attempts else "")


def _why_it_waits(queued: QueuedJob | None) -> str:
    """Where it will not pass by itself, such as PartitionTimeLimit: Slurm takes jobs that can never run."""
    if queued is None or not queued.waits or queued.reason in _PASSING_REASONS:
        return ""
    return f"waits: {queued.reason}"


def _eta(metrics: list[dict[str, float]], steps: float | None) -> float | None:
    """From the pace of the last logged steps, saves and evaluations between them included."""
    if steps is None or len(metrics) < 2:
        return None
    first, last = metrics[0], metrics[-1]
    done = last["step"] - first["step"]
    return (steps - last["step"]) * (last["time"] - first["time"]) / done if done > 0 else None


def _last_metrics(path: Path) -> list[dict[str, float]]:
    """The steps at the end of `metrics.jsonl` since the last pause: a restart is no pace."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()[0 if size <= _TAIL_BYTES else 1 :]
    except OSError:
        return []
    found = [values for line in lines if (values := parse_metrics(line)) is not None]
    restarts = found[-1].get("fault/restarts") if found else None
    return [values for values in found if values.get("fault/restarts") == restarts]


def _job_number(directory: RunDirectory, attempts: list[Attempt]) -> str | None:
    """Of the last submission, or of the last attempt, whichever is newer."""
    record: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        record = json.loads((directory.path / "slurm" / "job.json").read_text())
    attempt = attempts[-1] if attempts else None
    if attempt is not None and attempt.started > float(record.get("submitted", 0)):
        return attempt.job and str(record.get("job", attempt.job))
    job = record.get("job")
    return None if job is None else str(job)


def _config_text(directory: RunDirectory) -> str:
    try:
        return directory.config_path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _number(pattern: re.Pattern[str], text: str) -> float | None:
    match = pattern.search(text)
    return float(match[1]) if match else None
