"""`bench scaling`: processes of this machine, tables, JSON and pictures."""

import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from kvm_dist.bench.scaling.cluster import CLUSTERS
from kvm_dist.bench.scaling.extrapolate import (
    LENGTHS,
    METHODS,
    RANKS,
    VARIED,
    extrapolate,
    sensitivities,
)
from kvm_dist.bench.scaling.measured import Measured
from kvm_dist.bench.scaling.results import MODELLED_NOTE, Results, machine
from kvm_dist.bench.scaling.setting import QUICK, Setting, Task
from kvm_dist.exit_codes import ConfigError
from kvm_dist.run_directory import RunDirectory
from launch.bench_commands import Shown
from launch.console import table_console
from launch.ending import exit_code_of, leave
from launch.local import run_ranks
from launch.scaling_tables import tables
from launch.worker import end_with_the_launcher

# Pieces of work of each task, in steps of one process, for the time left only.
PIECES: dict[Task, float] = {"whole": 1.0, "alone": 1.2, "together": 0.6, "heads": 0.6, "pairs": 1.2}
MEASURING = 0.8  # share of the measured part in the whole, likewise
POLL_SECONDS = 0.5
Report = Callable[[str, float], None]  # what is being done, and the share of the whole that is done


def bench_scaling(quick: bool, model_only: bool, tokens: int | None, json_path: Path | None) -> None:
    """Measure, replay, extrapolate, print, and write the JSON and the pictures beside it."""
    setting = _setting(quick, tokens)
    if not model_only and (cores := os.cpu_count() or 1) < setting.ranks:
        raise ConfigError(
            f"bench scaling: {setting.ranks} ranks on {cores} core measure nothing; use --model-only"
        )
    found = machine()
    lengths, ranks = (LENGTHS[:1], RANKS[:1]) if quick else (LENGTHS, RANKS)
    headlines = VARIED[:1] if quick else VARIED
    measuring = 0.0 if model_only else MEASURING
    with Shown() as shown:
        measured = None
        if not model_only:
            measured = measure(setting, lambda what, share: shown.update(what, measuring * share))
        steps = len(CLUSTERS) * (len(lengths) * len(METHODS) + len(headlines))
        model = _Counted(shown.update, measuring, steps)
        modelled = extrapolate(lengths, ranks, model.next)
        varied = sensitivities(headlines, model.next)
        shown.update("done", 1.0)
    found["load_average_end"] = os.getloadavg()[0]
    results = Results(measured, modelled, varied, found)
    if json_path is not None:  # first: a reader of the tables may have enough before their end
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(results.as_json(), indent=1) + "\n", encoding="utf-8")
    console = table_console()
    for table in tables(results):
        console.print(table)
    console.print(MODELLED_NOTE)
    if json_path is not None:
        _draw(results, json_path)


class _Counted:
    """Reports steps of equal length after a share of the whole that is done."""

    def __init__(self, report: Report, before: float, steps: int) -> None:
        self._report, self._before, self._steps = report, before, steps
        self._begun = 0

    def next(self, what: str) -> None:
        self._report(what, self._before + (1 - self._before) * self._begun / self._steps)
        self._begun += 1


def _setting(quick: bool, tokens: int | None) -> Setting:
    base = QUICK if quick else Setting()
    try:
        setting = base if tokens is None else replace(base, tokens=tokens)
        setting.task_config("together")
    except ValidationError as error:
        said = "; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors())
        raise ConfigError(f"bench scaling --tokens {tokens}: {said}") from error
    return setting


def _draw(results: Results, json_path: Path) -> None:
    from kvm_dist.plots.scaling import efficiency_against_ranks, measured_step, turns, wavefront

    print(json_path)
    print(efficiency_against_ranks(results.modelled, json_path.with_suffix(".png")))
    print(wavefront(json_path.with_name(f"{json_path.stem}-wavefront.png")))
    print(turns(json_path.with_name(f"{json_path.stem}-turns.png")))
    if results.measured is not None:
        print(measured_step(results.measured, json_path.with_name(f"{json_path.stem}-measured.png")))


def measure(setting: Setting, report: Report) -> Measured:
    """Run the tasks, each in processes of its own; ends with their exit code if one fails."""
    folder = Path(tempfile.mkdtemp(prefix="kvm-dist-scaling-"))
    done, whole = 0.0, sum(PIECES.values()) * (setting.steps + 1)
    for task in get_args(Task):
        place = folder / task
        with _watched(place / "progress", task, done, PIECES[task], whole, report):
            _run(task, setting, RunDirectory(place))
        done += PIECES[task] * (setting.steps + 1)
    measured = Measured.read(setting, {task: folder / task for task in get_args(Task)})
    shutil.rmtree(folder)
    return measured


def _run(task: Task, setting: Setting, directory: RunDirectory) -> None:
    directory.logs.mkdir(parents=True)
    given = json.dumps(asdict(setting))
    arguments = [sys.executable, "-P", "-m", "launch.scaling_bench", task, given, str(directory.path)]
    code = run_ranks(arguments, setting.task_config(task).parallel, directory)
    if code:  # which rank failed, how and where its log is, was said as it ended
        raise SystemExit(code)


@contextmanager
def _watched(
    path: Path, task: Task, done: float, piece: float, whole: float, report: Report
) -> Iterator[None]:
    """Reports the lines that the task adds to its progress file."""
    ended = threading.Event()

    def watch() -> None:
        told = -1
        while True:
            last = ended.wait(POLL_SECONDS)
            lines = path.read_text("utf-8").count("\n") if path.exists() else 0
            if lines > told:
                told = lines
                report(_IN_WORDS[task], min((done + piece * lines) / whole, 1.0))
            if last:
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


_IN_WORDS: dict[Task, str] = {
    "whole": "one process trains the whole sequence",
    "alone": "one rank at a time",
    "together": "ranks train it together",
    "heads": "ranks that split heads train it",
    "pairs": "ranks train two at once, from both ends",
}


def main() -> None:
    """One process of a task: `python -P -m launch.scaling_bench TASK SETTING FOLDER`."""
    end_with_the_launcher()
    leave(exit_code_of(_run_task))


def _run_task() -> None:
    from kvm_dist.bench.scaling.rank import run_task

    task, given, folder = sys.argv[1:]
    values = json.loads(given)
    run_task(task, Setting(**{**values, "layers": tuple(values["layers"])}), Path(folder))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
