"""What an evaluation leaves behind: a JSON record, and a picture of the same name. Imports no torch."""

import json
import math
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvm_dist.data.files import replacing
from kvm_dist.evaluate.tasks import TASKS, Outcome
from kvm_dist.exit_codes import StorageError

if TYPE_CHECKING:
    from kvm_dist.pretrained import Pretrained

EVALUATIONS = "evaluations"
_PACKAGES = ("kvm-dist", "torch", "triton", "flash-linear-attention", "transformers", "numpy", "lm-eval")
_LONGEST_NAME = 120
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Subject:
    """What is evaluated, by which task. `run`: the directory of its run, None for other folders.

    asked: options other than their defaults, as `name=value`.
    """

    task: str
    path: Path
    overrides: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()

    @property
    def run(self) -> Path | None:
        run = self.path.absolute().parent.parent
        return run if self.path.absolute().parent == run / "checkpoints" else None

    def name(self, out: Path | None) -> str:
        """TASK-CHECKPOINT, and the overrides: another model has another file. In `out` also the run."""
        run = [self.run.name] if out is not None and self.run is not None else []
        return file_name([self.task, *run, self.path.absolute().name, *self.overrides])

    def record_path(self, out: Path | None) -> Path:
        """In `out`; without one in the run, and for other folders in `evaluations` here."""
        folder = out or (self.run / EVALUATIONS if self.run is not None else Path(EVALUATIONS))
        return folder / f"{self.name(out)}.json"

    def picture_path(self, out: Path | None) -> Path:
        folder = out or (self.run / "plots" if self.run is not None else Path(EVALUATIONS))
        return folder / f"{self.name(out)}.png"


def file_name(parts: Sequence[str]) -> str:
    """Of letters that file systems admit; a long one ends in a hash."""
    name = re.sub(r"[^A-Za-z0-9._=+-]+", "-", "-".join(parts))
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 9]}-{sha256(name.encode()).hexdigest()[:8]}"
    return name


def record_of(subject: Subject, opened: "Pretrained", outcome: Outcome, seconds: float) -> Record:
    """All that is needed to understand, compare and draw a result."""
    return {
        "task": subject.task,
        "name": opened.name,
        "checkpoint": str(subject.path),
        "step": opened.step,
        "overrides": list(subject.overrides),
        "asked": list(subject.asked),
        "metrics": dict(outcome.metrics),
        "settings": dict(outcome.settings),
        "details": dict(outcome.details),
        "model": {
            "layers": opened.config.model.layer_kinds,
            "parameters": sum(parameter.numel() for parameter in opened.model.parameters()),
            "tokenizer": opened.tokenizer.name,
            "precision": opened.config.parallel.precision,
        },
        "device": str(opened.device),
        "versions": {"python": platform.python_version(), **_versions()},
        "time": time.time(),
        "seconds": seconds,
    }


def require_place(path: Path) -> None:
    """StorageError, before anything is measured, where a file at `path` could not be written."""
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = "Permission denied" if nearest.is_dir() else "it is a file"
        raise StorageError(
            f"{path} cannot be written: {nearest}: {reason}; make room or permissions, or give --out DIR"
        )


def in_json(record: Record) -> str:
    return json.dumps(_finite(record), indent=1, ensure_ascii=False) + "\n"


def write_record(record: Record, path: Path) -> None:
    """Whole or not at all. Raises StorageError where it cannot be written."""
    text = in_json(record)
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        with replacing(path, path.parent) as file:
            file.write(text.encode("utf-8", "replace"))
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}; make room or permissions, or "
            "give --out DIR"
        ) from error


def read_records(folder: Path) -> dict[Path, Record]:
    """The results in a folder by their files, in order of name; files of other kinds are passed over."""
    found: dict[Path, Record] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(record, dict) and str(record.get("task", "")).partition(":")[0] in TASKS:
            found[path] = record
    return found


def draw_again(run: Path) -> list[Path]:
    """The pictures of a run's evaluations, drawn from their records; returns their paths."""
    pictures = []
    for path, record in read_records(run / EVALUATIONS).items():
        task = TASKS[record["task"].partition(":")[0]]
        pictures += task.draw([record], run / "plots" / f"{path.stem}.png")
    return pictures


def metric_names(subject: Subject, metrics: Mapping[str, float]) -> dict[str, float]:
    """`evaluation/TASK/NAME` with what stores admit in names; overrides stand before the name."""
    between = "".join(f"{override}/" for override in subject.overrides)
    task = subject.task.partition(":")[0]
    return {_admitted(f"evaluation/{task}/{between}{name}"): value for name, value in metrics.items()}


def _admitted(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_./ -]", "_", name)


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is not finite becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(part) for part in value]
    return value


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
