"""What is left of a run that ended abnormally: `postmortem.json`. Imports no torch."""

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvm_dist.attempts import current_attempt, end_attempt
from kvm_dist.exit_codes import ExitCode
from kvm_dist.hang import Hang, read_hang
from kvm_dist.heartbeat import Beat, as_record, read_beats
from kvm_dist.run_directory import RunDirectory

_TAIL_LINES, _TAIL_BYTES = 15, 8192


def write_postmortem(
    directory: RunDirectory,
    code: int,
    cause: str,
    *,
    rank: int,
    ranks: int,
    said: Sequence[str] | None = None,
    signal: str | None = None,
) -> None:
    """Which rank ended the newest attempt, where it was, and why. A full disk costs only this file.

    rank: the one that ended first; after a hang the record is about the silent one instead.
    said: the end of its log, read from there if None. signal: what killed it.
    """
    attempt = current_attempt(directory.path)
    beats = read_beats(directory.heartbeats, attempt)
    hang = read_hang(directory.stacks, attempt) if code == ExitCode.HANG else None
    if hang is not None and hang.cause:
        noticed_by, rank, cause, said = rank, hang.rank, hang.cause, None if hang.rank != rank else said
    else:
        noticed_by = rank
    log = directory.log_path(rank)
    record = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "attempt": attempt,
        "exit_code": code,
        "meaning": ExitCode(code).name.lower(),
        "signal": signal,
        "rank": rank,
        "ranks": ranks,
        "noticed_by": noticed_by,
        **_place(beats, rank, hang),
        "cause": cause,
        "log": str(log),
        "last_lines": list(log_tail(log) if said is None else said),
        "stacks": list(hang.stacks) if hang else [],
        "heartbeats": [_with_age(beat) for beat in beats],
    }
    _write(directory.postmortem_path, record)


def read_postmortem(directory: RunDirectory) -> dict[str, Any] | None:
    try:
        record = json.loads(directory.postmortem_path.read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def record_end(directory: RunDirectory, code: int, cause: str, *, rank: int = 0, ranks: int = 1) -> None:
    """How the newest attempt ended, for ranks and batch scripts that have no launcher to say it.

    What was written before stays: the first rank that ends is the one to blame, the others mourn it.
    """
    attempt = current_attempt(directory.path)
    known = read_postmortem(directory)
    if known and known.get("attempt") == attempt:
        return
    end_attempt(directory.path, attempt, code)
    if code not in (ExitCode.DONE, ExitCode.PREEMPTED):
        write_postmortem(directory, code, cause, rank=rank, ranks=ranks)


def log_tail(log: Path, start: int = 0) -> list[str]:
    """The last lines of a log, of those after byte `start`."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return []


def _place(beats: Sequence[Beat], rank: int, hang: Hang | None) -> dict[str, Any]:
    beat = next((beat for beat in beats if beat.rank == rank), None)
    if beat is None:
        return {"step": hang.step if hang else None, "phase": "start", "host": socket.gethostname()}
    return {"step": beat.step, "phase": beat.phase, "host": beat.host, "pid": beat.pid}


def _with_age(beat: Beat) -> dict[str, object]:
    return as_record(beat) | {"seconds_ago": round(max(0.0, time.time() - beat.time), 1)}


def _write(path: Path, record: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        print(f"kvm-dist: {path} was not written: {error}", file=sys.stderr)
