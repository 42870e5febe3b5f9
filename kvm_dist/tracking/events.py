"""`tracking-events.jsonl`: what the trainer tells the tracking process besides metrics. Imports no mlflow."""

import os
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvm_dist.metrics import append_line, parse_record

EVENTS_NAME = "tracking-events.jsonl"
Event = dict[str, Any]


class Kind(StrEnum):
    START = "start"
    CHECKPOINT = "checkpoint"
    ARTIFACT = "artifact"
    EVALUATION = "evaluation"
    END = "end"


class RunStatus(StrEnum):
    """How an attempt ended, in MLflow's words."""

    FINISHED = "FINISHED"
    FAILED = "FAILED"
    KILLED = "KILLED"


def append_event(run_dir: Path, kind: Kind, attempt: str, fields: Mapping[str, Any]) -> None:
    append_line(run_dir / EVENTS_NAME, {"kind": kind, "attempt": attempt, "time": time.time(), **fields})


def read_events(run_dir: Path) -> list[Event]:
    """All events of all attempts, oldest first."""
    return [parse_record(line) or {} for line, _ in Spool(run_dir / EVENTS_NAME).read()]


def latest_attempt(run_dir: Path) -> str | None:
    """The attempt that started last."""
    attempts = [event["attempt"] for event in read_events(run_dir) if event.get("kind") == Kind.START]
    return attempts[-1] if attempts else None


def append_end(run_dir: Path, attempt: str | None, status: RunStatus) -> None:
    """Ends an attempt that did not end itself and was not followed by another one."""
    if attempt is not None and not has_ended(run_dir, attempt) and latest_attempt(run_dir) == attempt:
        append_event(run_dir, Kind.END, attempt, {"status": status})


def has_ended(run_dir: Path, attempt: str | None) -> bool:
    """Whether the trainer of that attempt said how it ended."""
    events = read_events(run_dir)
    return any(event.get("kind") == Kind.END and event.get("attempt") == attempt for event in events)


class Spool:
    """Reads a growing file of lines; starts again when the file was replaced by a shorter one."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self._inode: int | None = None

    def read(self) -> list[tuple[bytes, int]]:
        """Complete lines that are new, each with the offset behind it; `advance` tells that one is done."""
        try:
            with self.path.open("rb") as file:
                self._start_again_if_replaced(file.fileno())
                file.seek(self.offset)
                content = file.read()
        except FileNotFoundError:
            return []
        lines, place = [], self.offset
        for line in content[: content.rfind(b"\n") + 1].splitlines(keepends=True):
            place += len(line)
            lines.append((line, place))
        return lines

    def advance(self, offset: int) -> None:
        self.offset = offset

    def _start_again_if_replaced(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        replaced = self._inode is not None and status.st_ino != self._inode
        if replaced or status.st_size < self.offset:
            self.offset = 0
        self._inode = status.st_ino
