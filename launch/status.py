"""`kvm-dist status`: all runs in a table, or one in detail. Imports no torch."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from kvm_dist.heartbeat import Beat, as_record, read_beats
from kvm_dist.postmortem import read_postmortem
from kvm_dist.progress import duration, short_count
from kvm_dist.run_directory import RunDirectory
from launch.console import table_console
from launch.status_queue import queued_jobs
from launch.status_run import RunStatus, find_run, find_runs, read_status

_COLOURS = {"running": "green", "finished": "blue", "crashed": "red", "hung": "red", "hung?": "red"}
_SHOWN_RANKS = 16


def show_status(run: Path | None, run_root: Path, as_json: bool) -> None:
    """Print the runs under `run_root`, or the one named."""
    queue = queued_jobs()
    if run is not None:
        path = find_run(run, run_root)
        _show_one(read_status(path, queue), as_json)
        return
    found = [read_status(path, queue) for path in find_runs(run_root)]
    if as_json:
        print(json.dumps([status_record(status) for status in found], indent=2))
    elif not found:
        print(f"{run_root}: no runs")
    else:
        table_console().print(status_table(found))


def status_record(status: RunStatus) -> dict[str, object]:
    return {**asdict(status), "path": str(status.path), "nodes": list(status.nodes)}


def status_table(found: Sequence[RunStatus]) -> Table:
    """One line a run."""
    table = Table("run", "state", box=None, pad_edge=False)
    for name in ("step", "loss", "tok/s", "ETA"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("node", "attempt"):
        table.add_column(name)
    table.add_column("last error", no_wrap=True, overflow="ellipsis")
    for status in found:
        colour = _COLOURS.get(status.state, "yellow")
        table.add_row(
            escape(status.name),
            f"[{colour}]{status.state}[/{colour}]",
            _steps(status),
            "" if status.loss is None else f"{status.loss:.4f}",
            "" if status.tokens_per_second is None else short_count(status.tokens_per_second),
            "" if status.eta_seconds is None else duration(status.eta_seconds),
            escape(_nodes(status)),
            str(status.attempt or ""),
            escape(status.error),
        )
    return table


def _show_one(status: RunStatus, as_json: bool) -> None:
    directory = RunDirectory(status.path)
    beats = read_beats(directory.heartbeats, status.attempt)
    if as_json:
        record = status_record(status) | {"heartbeats": [as_record(beat) for beat in beats]}
        print(json.dumps(record | {"postmortem": read_postmortem(directory)}, indent=2))
        return
    for name, value in _details(status):
        if value:
            print(f"{name:12}{value}")
    if status.live and beats:
        print("\nrank  host          step  phase      since")
        for beat in _worth_showing(beats):
            since = duration(time.time() - beat.time)
            print(f"{beat.rank:4d}  {beat.host:12}  {beat.step:4d}  {beat.phase:9}  {since}")
        if len(beats) > _SHOWN_RANKS:
            print(f"and {len(beats) - _SHOWN_RANKS} ranks that are further; all of them: --json")


def _details(status: RunStatus) -> list[tuple[str, str]]:
    speed, eta = status.tokens_per_second, status.eta_seconds
    return [
        ("run", str(status.path)),
        ("state", status.state + (f", {status.phase}" if status.phase else "")),
        ("step", _steps(status)),
        ("loss", "" if status.loss is None else f"{status.loss:.4f}"),
        ("tokens/s", "" if speed is None else short_count(speed)),
        ("ETA", "" if eta is None else duration(eta)),
        ("checkpoint", f"step {status.checkpoint}" if status.checkpoint else "none yet"),
        ("attempt", str(status.attempt or "")),
        ("node", _nodes(status)),
        ("job", status.job or ""),
        ("last sign", "" if status.updated is None else f"{duration(time.time() - status.updated)} ago"),
        ("last error", status.error),
    ]


def _worth_showing(beats: Sequence[Beat]) -> list[Beat]:
    """Those furthest behind."""
    behind = sorted(beats, key=lambda beat: (beat.count, beat.rank))[:_SHOWN_RANKS]
    return sorted(behind, key=lambda beat: beat.rank)


def _steps(status: RunStatus) -> str:
    return f"{status.step}/{'?' if status.steps is None else status.steps}"


def _nodes(status: RunStatus) -> str:
    shown = ", ".join(status.nodes[:2])
    return shown + (f" and {len(status.nodes) - 2} more" if len(status.nodes) > 2 else "")
