"""Run directories as runs leave them behind, written by hand."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from kvm_dist.attempts import begin_attempt, end_attempt
from kvm_dist.heartbeat import Heartbeat
from kvm_dist.load import dump_config, load_config
from kvm_dist.metrics import append_metrics
from kvm_dist.run_lock import process_start


def write_run(root: Path, name: str, *, steps: int = 100) -> Path:
    """A run that was created and has not begun."""
    path = root / name
    (path / "logs").mkdir(parents=True)
    (path / "checkpoints").mkdir()
    (root / "made.yaml").write_text(f"name: {name}\ntrain: {{steps: {steps}}}\n")
    (path / "config.yaml").write_text(dump_config(load_config(root / "made.yaml").config))
    (root / "made.yaml").unlink()
    return path


def take_steps(path: Path, first: int, last: int, seconds: float = 2.0, restarts: int = 0) -> None:
    """Logged steps, `seconds` apart, the last one now."""
    for step in range(first, last + 1):
        metrics = {"train/loss": 10.0 / step, "perf/tokens_per_second": 1500.0, "fault/restarts": restarts}
        append_metrics(path / "metrics.jsonl", step, metrics, time.time() - (last - step) * seconds)


def attempt(path: Path, code: int | None = None, job: str | None = None) -> int:
    number = begin_attempt(path, job=job).number
    if code is not None:
        end_attempt(path, number, code)
    return number


def hold(path: Path, pid: int | None = None, host: str | None = None) -> None:
    """A lock of process `pid`, this one if None."""
    pid = os.getpid() if pid is None else pid
    holder: dict[str, Any] = {"host": host or socket.gethostname(), "pid": pid, "since": "today"}
    holder["process_start"] = process_start(pid) or 0
    (path / "lock").write_text(json.dumps(holder))


def beat(path: Path, rank: int, number: int, step: int, phase: str) -> None:
    heartbeat = Heartbeat(path / "heartbeats", rank, number)
    heartbeat.begin_step(step)
    heartbeat.beat(phase)
    heartbeat.close()


def submitted(path: Path, job: str, when: float | None = None) -> None:
    (path / "slurm").mkdir()
    record = {"job": job, "submitted": time.time() if when is None else when, "folder": str(path)}
    (path / "slurm" / "job.json").write_text(json.dumps(record))
