"""`evaluate`: one task over one or more checkpoints; a table here, records and pictures on disk."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvm_dist.evaluate.earlier import keep_earlier
from kvm_dist.evaluate.results import (
    EVALUATIONS,
    Record,
    Subject,
    metric_names,
    read_records,
    record_of,
    require_place,
    write_record,
)
from kvm_dist.evaluate.tasks import Options, Outcome, Task, find_task
from kvm_dist.exit_codes import ConfigError, StorageError
from kvm_dist.model_folder import require_model_folder
from kvm_dist.progress import Progress

if TYPE_CHECKING:
    from kvm_dist.pretrained import Pretrained

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE")
_FILE_COLUMNS = 200  # nothing is cut where there is no terminal to cut it for


def evaluate(targets: Sequence[str], task_name: str, out: Path | None, options: Options) -> None:
    """Measure every checkpoint among `targets` with the overrides among them; no network is asked.

    Raises ConfigError for an unknown task, DataError without data, StorageError without a checkpoint.
    """
    task, argument = find_task(task_name)
    options = replace(options, argument=argument)
    task.require_read(options)
    paths, overrides = split_targets(targets)
    for path in paths:
        require_model_folder(path)
    for name in _OFFLINE:
        os.environ.setdefault(name, "1")
    taken: dict[Path, Path] = {}
    records = [_evaluate_one(task, task_name, path, overrides, out, options, taken) for path in paths]
    if len(records) > 1:
        compared = (out or Path(EVALUATIONS)) / f"{task.name}-{len(records)}-compared.png"
        for picture in _draw(task, records, compared):
            print(picture)


def split_targets(targets: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Folders and `key=value` overrides; a folder that is there may have an equals sign in its name."""
    overrides = [text for text in targets if "=" in text and not Path(text).exists()]
    paths = [Path(text) for text in targets if text not in overrides]
    if not paths:
        raise ConfigError(
            "evaluate: no checkpoint among the arguments; give a run directory, a folder of one checkpoint, "
            "or an exported one"
        )
    return paths, overrides


def _evaluate_one(
    task: Task,
    task_name: str,
    path: Path,
    overrides: Sequence[str],
    out: Path | None,
    options: Options,
    taken: dict[Path, Path],
) -> Record:
    """taken: files that were written, and of which folder; two folders of one name must not share one."""
    from kvm_dist.pretrained import open_pretrained

    opened = open_pretrained(path, overrides)
    subject = Subject(task_name, opened.path, tuple(overrides), options.chosen)
    written = subject.record_path(out)
    if (other := taken.setdefault(written, opened.path.resolve())) != opened.path.resolve():
        raise ConfigError(
            f"results of {opened.path} would replace those of {other} in {written}; evaluate them one by "
            "one, each with its own --out DIR"
        )
    pictured = subject.picture_path(out)
    for place in (written, pictured):
        require_place(place)
    begun = time.monotonic()
    outcome = _watched(task, opened, options)
    record = record_of(subject, opened, outcome, time.monotonic() - begun)
    earlier = keep_earlier(written, record)
    write_record(record, written)
    pictures = _draw(task, [record], pictured)
    if earlier is not None:
        print(f"kvm-dist: earlier results of another question are kept: {earlier}", file=sys.stderr)
        if kept := read_records(earlier.parent).get(earlier):
            _draw(task, [kept], pictured.with_name(f"{earlier.stem}.png"))
    try:
        _print_table(subject, opened.step, outcome)
        print(*[written, *pictures], sep="\n")
    finally:  # though nobody may read on
        _track(subject, opened, outcome, [written, *pictures])
    return record


def _watched(task: Task, opened: "Pretrained", options: Options) -> Outcome:
    """The outcome, with a line that tells how far it is."""
    shown = _Shown()
    try:
        return task.run(opened, options, shown)
    finally:
        shown.close()


class _Shown:
    """A line for every total that a task counts up to, one after the other."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._told = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if self._progress is None or self._progress.total != total:
            self.close()
            self._progress = Progress(total, noun="token", begun=self._told)
        self._progress.update(done, {})
        self._told = time.monotonic()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()


def _draw(task: Task, records: Sequence[Record], path: Path) -> list[Path]:
    try:
        return task.draw(records, path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}; give --out DIR") from error


def _print_table(subject: Subject, step: int, outcome: Outcome) -> None:
    at = f" (step {step:,})" if step else ""
    of = ", ".join([f"{subject.path}{at}", *subject.overrides])
    print(f"{subject.task} of {of}")
    table = Table()
    for number, column in enumerate(outcome.columns):
        table.add_column(column, justify="right" if number else "left")
    for row in outcome.rows:
        table.add_row(*map(escape, row))
    console = Console() if sys.stdout.isatty() else Console(width=_FILE_COLUMNS)
    console.print(table)


def _track(subject: Subject, opened: "Pretrained", outcome: Outcome, files: Sequence[Path]) -> None:
    """A store that does not answer costs nothing but a word: the results lie on disk."""
    if subject.run is None:
        return
    from kvm_dist.tracking.evaluation import track_evaluation

    metrics = metric_names(subject, outcome.metrics)
    try:
        sent = track_evaluation(subject.run, opened.config, opened.step, metrics, files)
    except OSError as error:
        print(f"kvm-dist: the results are not tracked: {error}", file=sys.stderr)
        return
    if sent is False:
        print(
            f"kvm-dist: the tracking store gets the results with the next start or step of {subject.run}",
            file=sys.stderr,
        )
