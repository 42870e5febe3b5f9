"""`bench`: measured tables on the terminal, JSON and a picture beside."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvm_dist.bench.results import Results
from kvm_dist.bench.setting import BUDGETS, FULL_ATTENTION, QUICK, Setting
from kvm_dist.exit_codes import ConfigError
from launch.console import table_console


def bench_kvm(device: str, lengths: list[int], quick: bool, threads: int, json_path: Path | None) -> None:
    """Measure, print, and write the JSON and the picture beside it."""
    if device.startswith("cuda"):
        from launch.accelerator_bench import bench_accelerator

        bench_accelerator(device, lengths, quick, json_path)
        return
    if device != "cpu":
        raise ConfigError(f"bench kvm --device {device}: want cpu or cuda")
    setting = _setting(lengths, quick, threads)
    from kvm_dist.bench.kvm import bench_kvm as measured

    with Shown() as shown:
        results = measured(setting, shown.update)
    if json_path is not None:  # first: a reader of the tables may have enough before their end
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(results.as_json(), indent=1) + "\n", encoding="utf-8")
    console = table_console()
    for table in (_training(results), _once(results), _goals(results)):
        if table.row_count:
            console.print(table)
    if json_path is not None:
        from kvm_dist.plots.bench import time_against_length

        print(f"{json_path}\n{time_against_length(results, json_path.with_suffix('.png'))}")


def compile_report(quick: bool, workers: int, json_path: Path | None) -> None:
    """What the kernels compile to for every GPU, and the floor of each by arithmetic and by memory."""
    try:
        from launch.kernel_tables import print_compile_report
    except ImportError as error:
        raise ConfigError(
            f"bench kvm --compile-report: {error}; it wants Triton, which pip installs on Linux"
        ) from error
    with Shown("compiling") as shown:
        print_compile_report(quick, workers, json_path, shown.update)


def tune(device: str, widths: list[int], rows: Path | None) -> None:
    """Search for faster tiles of the kernels on this GPU, and write them."""
    from launch.tuning_bench import tune as tuned

    tuned(device, widths, rows)


def _setting(lengths: list[int], quick: bool, threads: int) -> Setting:
    base = QUICK if quick else Setting()
    try:
        return Setting(
            **{**vars(base), "threads": threads, "lengths": tuple(sorted(lengths)) or base.lengths}
        )
    except ValueError as error:
        raise ConfigError(f"bench kvm: {error}") from error


class Shown:
    """A bar with the time left on a terminal; elsewhere a line for each step."""

    def __init__(self, first: str = "warming up") -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._task = self._progress.add_task(first, total=1.0)

    def __enter__(self) -> "Shown":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, what: str, done: float) -> None:
        self._progress.update(self._task, description=what, completed=done)
        if self._progress.disable:
            print(f"kvm-dist: {done:4.0%} done: {what}", file=sys.stderr, flush=True)


def _training(results: Results) -> Table:
    setting = results.setting
    machine = results.machine
    table = Table(
        title=f"forward + backward in seconds, float32, B={setting.batch} H={setting.heads} "
        f"D={setting.width} C={setting.chunk} n={setting.window_chunks}, {setting.threads} threads, "
        f"load average {machine['load_average_start']:.1f} to {machine['load_average_end']:.1f}",
        title_justify="left",
    )
    for name in ("tokens", "contender", "forward", "backward", "both", "speedup", "exponent"):
        table.add_column(
            name, justify="left" if name == "contender" else "right", no_wrap=name == "contender"
        )
    for one in results.timings:
        speedup = results.speedup(one.contender, one.tokens)
        last = one.tokens == max(setting.lengths)
        table.add_row(
            f"{one.tokens:,}",
            one.contender,
            f"{median(one.forward):.3f}",
            f"{median(one.backward):.3f}",
            f"{median(one.total):.3f}",
            "-" if speedup is None else f"{speedup:.2f}",
            _number(results.exponent(one.contender)) if last else "",
            end_section=one.contender == setting.contenders(one.tokens)[-1],
        )
    return table


def _once(results: Results) -> Table:
    """Decode, memory and pieces."""
    context = results.setting.decode_context
    table = Table(
        title=f"decode at {context:,} tokens; peak memory at {results.setting.memory_length:,} above "
        "inputs, outputs and their gradients",
        title_justify="left",
        caption="a prefill in pieces differs from one prefill by at most "
        f"{results.pieces_error:.1e} of the largest output",
        caption_justify="left",
    )
    columns = ("contender", "ms/token", "median", "speedup", "cache MiB", "peak GB")
    for name in columns:
        table.add_column(
            name, justify="left" if name == "contender" else "right", no_wrap=name == "contender"
        )
    for contender in (*BUDGETS, FULL_ATTENTION):
        table.add_row(contender, *_decode_cells(results, contender), _peak(results, contender))
    return table


def _decode_cells(results: Results, contender: str) -> Iterator[str]:
    one = results.decoding(contender)
    if one is None:
        yield from ("-",) * 4
        return
    yield f"{1e3 * one.mean:.3f}"
    yield f"{1e3 * median(one.seconds):.3f}"
    yield _number(results.decode_speedup(contender))
    yield f"{one.cache_bytes / 2**20:.1f}"


def _peak(results: Results, contender: str) -> str:
    return f"{results.peak_bytes[contender] / 1e9:.3f}" if contender in results.peak_bytes else "-"


def _goals(results: Results) -> Table:
    table = Table(title="goals", title_justify="left")
    for name in ("goal", "wanted", "got", ""):
        table.add_column(name, justify="right" if name in ("wanted", "got") else "left")
    for goal in results.goals():
        sign = ">=" if goal.at_least else "<="
        table.add_row(
            goal.name, f"{sign} {goal.wanted:g}", f"{goal.got:.2f}", "met" if goal.met else "not met"
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
