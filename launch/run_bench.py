"""`bench step`, `bench data` and `bench checkpoint`: tables on the terminal, JSON beside."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError
from rich.console import Group
from rich.table import Table

from kvm_dist.bench.checkpoint import JUDGED_BYTES, WANTED_SHARE, CheckpointBench
from kvm_dist.bench.data import DataBench
from kvm_dist.bench.scaling.results import machine
from kvm_dist.bench.step import StepBench, one_rank
from kvm_dist.config import RunConfig
from kvm_dist.exit_codes import ConfigError
from kvm_dist.load import load_config
from launch.bench_commands import Shown
from launch.console import table_console
from parallel.world import World, join_world, leave_world


def bench_step(
    config: Path, overrides: Sequence[str], tokens: int | None, steps: int, json_path: Path | None
) -> None:
    """Measure, print, and write the JSON."""
    from kvm_dist.bench.step import bench_step as measured

    run = _of_one_rank(config, overrides, tokens)
    found = machine()
    with _alone(run) as world, Shown() as shown:
        results = measured(world, run, steps, shown.update)
    _tell([phases_table(results), modelled_table(results)], results.as_json(), found, json_path)


def bench_data(source: str, tokenizer: str, tokens: int, batches: int, json_path: Path | None) -> None:
    """Measure, print, and write the JSON."""
    from kvm_dist.bench.data import bench_data as measured

    found = machine()
    with Shown("preparing") as shown:
        results = measured(source, tokenizer, tokens, batches, shown.update)
    _tell([data_table(results)], results.as_json(), found, json_path)


def bench_checkpoint(config: Path, overrides: Sequence[str], rounds: int, json_path: Path | None) -> None:
    """Measure, print, and write the JSON."""
    from kvm_dist.bench.checkpoint import bench_checkpoint as measured

    run = _of_one_rank(config, overrides, None)
    found = machine()
    with _alone(run) as world, Shown() as shown:
        results = measured(world, run, rounds, shown.update)
    _tell([checkpoint_table(results)], results.as_json(), found, json_path)


def _of_one_rank(config: Path, overrides: Sequence[str], tokens: int | None) -> RunConfig:
    try:
        return one_rank(load_config(config, overrides).config, tokens)
    except ValidationError as error:
        said = "; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors())
        raise ConfigError(f"{config} on one rank: {said}") from error


@contextmanager
def _alone(config: RunConfig) -> Iterator[World]:
    try:
        world = join_world(config.parallel, config.device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        yield world
    finally:
        leave_world()


def _tell(
    tables: Sequence[Group], results: dict[str, Any], found: dict[str, Any], json_path: Path | None
) -> None:
    """The file first: a reader of the tables may have enough before their end."""
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps({"machine": found, **results}, indent=1) + "\n", encoding="utf-8")
    console = table_console()
    for table in tables:
        console.print(table)
    if json_path is not None:
        print(json_path)


def phases_table(results: StepBench) -> Group:
    """Where the time of a step goes."""
    title = (
        f"{results.name}: a step of {results.sequences} sequences, {results.tokens:,} tokens, on one rank "
        f"({results.device}, {results.threads} threads): {results.step_seconds:.3f} s, "
        f"{results.tokens_per_second:,.0f} tokens/s"
    )
    table = _table("phase", "seconds", "share")
    total = sum(results.phases.values())
    for phase, seconds in results.phases.items():
        table.add_row(phase, f"{seconds:.4f}", f"{seconds / total:.1%}")
    return Group(title, table)


def modelled_table(results: StepBench) -> Group:
    """What the plan says beside what was measured."""
    table = _table("", "modelled", "measured", "measured / modelled")
    rates = results.flops / results.step_seconds, results.matmul_flops_per_second
    table.add_row(
        "seconds, if all were large products",
        f"{results.floor_seconds:.3f}",
        f"{results.step_seconds:.3f}",
        f"{results.step_seconds / results.floor_seconds:.2f}",
    )
    table.add_row(
        "GFLOP/s, of large products and of the step", *(f"{rate / 1e9:,.1f}" for rate in reversed(rates)), ""
    )
    table.add_row(
        "memory of the rank, without and with the allocator's, MB",
        f"{results.planned_bytes / 1e6:,.1f}",
        f"{results.peak_bytes / 1e6:,.1f}",
        f"{results.peak_bytes / results.planned_bytes:.2f}",
    )
    per_layer = results.operators / results.layers
    table.add_row("operators of a step", "", f"{results.operators:,} ({per_layer:,.0f} a layer)", "")
    return Group("beside its plan", table)


def data_table(results: DataBench) -> Group:
    title = (
        f"{results.source}: {results.tokens:,} tokens in {results.shards} shards, "
        f"{results.bytes / 1e6:,.1f} MB; tokenizer {results.tokenizer}; "
        f"sequences of {results.sequence_length:,}"
    )
    table = _table("", "seconds", "tokens/s", "MB/s")
    for turn in results.turns:
        rate = f"{turn.bytes / turn.seconds / 1e6:,.1f}" if turn.bytes else ""
        table.add_row(turn.what, f"{turn.seconds:.3f}", f"{turn.tokens_per_second:,.0f}", rate)
    return Group(title, table)


def checkpoint_table(results: CheckpointBench) -> Group:
    """Rates are of the bytes of one checkpoint."""
    title = (
        f"{results.name}: a checkpoint of {results.bytes / 1e6:,.1f} MB in {results.files} files "
        f"(planned {results.planned_bytes / 1e6:,.1f} MB) on the disk of {results.folder}"
    )
    table = _table("", "seconds", "MB/s", "of the disk's own rate", "")
    rows = (
        ("training stands still for a save", results.blocking, None),
        ("save, read back and in place", results.save, results.save_share),
        ("write and fsync plain files", results.raw_write, None),
        ("load, verified", results.load, results.load_share),
        ("read plain files", results.raw_read, None),
    )
    for what, seconds, share in rows:
        rate = "" if seconds is results.blocking else f"{results.bytes / median(seconds) / 1e6:,.0f}"
        in_words = "" if share is None else f"{share:.0%}"
        table.add_row(what, f"{median(seconds):.3f}", rate, in_words, _verdict(share, results.bytes))
    return Group(title, table)


def _verdict(share: float | None, size: int) -> str:
    if share is None:
        return ""
    if size < JUDGED_BYTES:
        return "too small to judge"
    return "met" if share >= WANTED_SHARE else f"wanted {WANTED_SHARE:.0%}"


def _table(*columns: str) -> Table:
    table = Table()
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table
