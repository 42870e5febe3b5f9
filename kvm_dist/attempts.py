"""The starts of a run and how they ended: `attempts.jsonl`. Imports no torch.

Whoever starts ranks calls `begin_attempt` before and `end_attempt` after, under the run's lock. A batch
script asks `exit_code_after` whether its run may be queued again.
"""

import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvm_dist.checkpoint import list_checkpoints
from kvm_dist.exit_codes import ExitCode, NoProgress, StorageError
from kvm_dist.metrics import append_line, parse_record

ATTEMPTS_NAME = "attempts.jsonl"
STOP_MARKER = "stop_requested"  # in a run directory: somebody asked for the end, do not queue it again
TRIES = 3
_GOOD_ENDS = (ExitCode.DONE, ExitCode.PREEMPTED)


@dataclass(frozen=True)
class Attempt:
    """One start. checkpoint: step of the newest checkpoint it found, 0 if none. code: None while it runs, and
    for ever if nobody was left to write it. folder: the working directory, which relative paths start from.
    """

    number: int
    started: float
    host: str
    pid: int
    checkpoint: int
    steps: int = 0
    job: str | None = None
    folder: str = ""
    code: int | None = None
    ended: float | None = None


def begin_attempt(run_dir: Path, *, steps: int = 0, job: str | None = None) -> Attempt:
    """Write down that the run is started. Raises NoProgress after `TRIES` tries without a new checkpoint.

    A refusal starts the count again: whoever starts the run once more after it has seen the reason.
    """
    attempts = read_attempts(run_dir)
    tries = tries_without_checkpoint(run_dir)
    if tries >= TRIES:
        _append(run_dir, {"refused": time.time()})
        raise NoProgress(no_progress_message(run_dir, tries))
    attempt = Attempt(
        number=attempts[-1].number + 1 if attempts else 1,
        started=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
        checkpoint=newest_step(run_dir),
        steps=steps,
        job=job,
        folder=os.getcwd(),
    )
    _append(run_dir, {key: value for key, value in vars(attempt).items() if value is not None})
    (run_dir / STOP_MARKER).unlink(missing_ok=True)
    return attempt


def end_attempt(run_dir: Path, number: int, code: int) -> None:
    """Write down how attempt `number` ended. A full disk costs only this line."""
    try:
        _append(run_dir, {"number": number, "code": code, "ended": time.time()})
    except StorageError as error:
        print(f"kvm-dist: {error}", file=sys.stderr)


def exit_code_after(run_dir: Path, code: int) -> int:
    """What a job that ended with `code` shall exit with: 93 if starting it again would get nowhere."""
    if code in _GOOD_ENDS or tries_without_checkpoint(run_dir) < TRIES:
        return code
    return int(ExitCode.NO_PROGRESS)


def tries_without_checkpoint(run_dir: Path) -> int:
    """How many starts in a row have ended badly and left no newer checkpoint than they found."""
    newest = newest_step(run_dir)
    tries = 0
    for attempt in reversed(_since_refusal(run_dir)):
        if attempt.code in _GOOD_ENDS or attempt.checkpoint < newest:
            break
        tries += 1
    return tries


def no_progress_message(run_dir: Path, tries: int) -> str:
    return (
        f"{run_dir}: the last {tries} starts ended badly before a checkpoint newer than step "
        f"{newest_step(run_dir)}; see {run_dir / 'postmortem.json'}. Mend the cause and start the run once "
        "more: it counts from one again"
    )


def read_attempts(run_dir: Path) -> list[Attempt]:
    """All starts, oldest first."""
    return list(_merged(_records(run_dir)).values())


def current_attempt(run_dir: Path) -> int:
    """The number of the newest start; 0 if nobody has written one down."""
    attempts = read_attempts(run_dir)
    return attempts[-1].number if attempts else 0


def newest_step(run_dir: Path) -> int:
    """Of the newest complete checkpoint; 0 if there is none."""
    try:
        return max((info.step for info in list_checkpoints(run_dir) if info.complete), default=0)
    except StorageError:
        return 0


def _since_refusal(run_dir: Path) -> list[Attempt]:
    records = _records(run_dir)
    refusals = [position for position, record in enumerate(records) if "refused" in record]
    return list(_merged(records[refusals[-1] + 1 :] if refusals else records).values())


def _merged(records: list[dict[str, Any]]) -> dict[int, Attempt]:
    """A start and its end are two lines."""
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        if isinstance(record.get("number"), int):
            found.setdefault(record["number"], {}).update(record)
    return {number: _attempt(record) for number, record in found.items() if "started" in record}


def _attempt(record: Mapping[str, Any]) -> Attempt:
    return Attempt(**{name: record[name] for name in Attempt.__dataclass_fields__ if name in record})


def _records(run_dir: Path) -> list[dict[str, Any]]:
    try:
        content = (run_dir / ATTEMPTS_NAME).read_bytes()
    except OSError:
        return []
    return [record for line in content.splitlines() if (record := parse_record(line)) is not None]


def _append(run_dir: Path, record: Mapping[str, Any]) -> None:
    try:
        append_line(run_dir / ATTEMPTS_NAME, record)
    except OSError as error:
        raise StorageError(
            f"{run_dir / ATTEMPTS_NAME} cannot be written: {error.strerror}; make room or permissions, or "
            "choose another place: run_root=PATH"
        ) from error
