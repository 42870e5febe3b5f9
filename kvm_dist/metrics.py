"""`metrics.jsonl`: one JSON object per logged step, appended whole lines at a time. Imports no torch."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

METRICS_NAME = "metrics.jsonl"
_NOT_FINITE = (
    "not_finite"  # key -> "nan", "inf" or "-inf"; the value itself is null, so that the line stays JSON
)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Appends one JSON line with a single write; a torn line left by a kill is closed first."""
    line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o640)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def append_metrics(path: Path, step: int, metrics: Mapping[str, float], seconds: float | None = None) -> None:
    """Appends the metrics of one step. `seconds`: Unix time, now if None."""
    values = {key: float(value) for key, value in metrics.items()}
    record: dict[str, Any] = {"step": step, "time": time.time() if seconds is None else seconds}
    record |= {key: value if math.isfinite(value) else None for key, value in values.items()}
    not_finite = {key: str(value) for key, value in values.items() if not math.isfinite(value)}
    if not_finite:
        record[_NOT_FINITE] = not_finite
    append_line(path, record)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """All logged steps, oldest first: `step`, `time` and metrics; not-finite values come back as such."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    return [values for line in content.splitlines() if (values := parse_metrics(line)) is not None]


def parse_metrics(line: bytes) -> dict[str, float] | None:
    """One line of `metrics.jsonl`; None if it is torn or no record of ours."""
    record = parse_record(line)
    if (
        record is None
        or type(record.get("step")) is not int
        or not isinstance(record.get("time"), float | int)
    ):
        return None
    flags = record.pop(_NOT_FINITE, {})
    values = record | {key: float(flag) for key, flag in flags.items()}
    return {key: value for key, value in values.items() if isinstance(value, float | int)}


def parse_record(line: bytes) -> dict[str, Any] | None:
    """A JSON object of one line, or None."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def truncate_after(path: Path, step: int) -> None:
    """Drops lines beyond `step` and torn lines: what a resumed run logs again is then there once."""
    if not path.exists():
        return
    kept = b"".join(_lines_until(path.read_bytes(), step))
    if kept == path.read_bytes():
        return
    replacement = path.with_name(f"{path.name}.partial")
    with replacement.open("wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(replacement, path)


def rewind(path: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Make the file end with `step`; `metrics` are its values, for a run killed before it logged them."""
    truncate_after(path, step)
    logged = read_metrics(path)
    if not logged or logged[-1]["step"] < step:
        append_metrics(path, step, metrics)


def _lines_until(content: bytes, step: int) -> Iterator[bytes]:
    for line in content.splitlines(keepends=True):
        values = parse_metrics(line) if line.endswith(b"\n") else None
        if values is not None and values["step"] <= step:
            yield line
