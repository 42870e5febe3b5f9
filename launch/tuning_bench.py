"""`bench kvm --tune`: times tiles of the kernels on this GPU, and writes what is faster as rows."""

import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from kvm_dist.bench.setting import BUDGETS
from kvm_dist.bench.tuning import Found, Search, Trials
from kvm_dist.exit_codes import ConfigError
from launch.console import table_console
from models.kvm.kernels.measured import FOLDER, MeasuredRow, write_rows
from models.kvm.kernels.tuning import TARGETS, WIDEST_HEAD, Row

if TYPE_CHECKING:
    import torch

SECONDS = 240.0  # of searching, for all widths together
TOKENS = 8192
BATCH = 2


def tune(device_name: str, widths: Sequence[int], rows_path: Path | None) -> None:
    """Check the kernels, search for each width in bfloat16, print and write what is faster."""
    if wrong := [width for width in widths if not 1 <= width <= WIDEST_HEAD]:
        raise ConfigError(f"bench kvm --width {wrong[0]}: want head widths of 1 to {WIDEST_HEAD}")
    from launch.accelerator_bench import checked, gpu_of

    device = gpu_of("cuda" if device_name == "cpu" else device_name, "bench kvm --tune")
    import torch

    from kvm_dist.bench.one_layer import Shape
    from kvm_dist.bench.tuning_trials import EventClock, OperatorTrials

    path = rows_path or FOLDER / f"{_target_of(device)}.json"
    end = time.perf_counter() + SECONDS
    rows: list[MeasuredRow] = []
    with torch.cuda.device(device):
        for place, width in enumerate(widths):
            shape = Shape(batch=BATCH, head_dim=width)
            checked(device, shape)
            trials = OperatorTrials(device, shape, TOKENS, BUDGETS, EventClock(device))
            now = time.perf_counter()
            deadline = now + (end - now) / (len(widths) - place)
            rows += search(trials, deadline, path, torch.cuda.get_device_name(device))
    table_console().print(found_table(rows))
    print(f"{path}: {len(rows)} new rows" if rows else "nothing faster than the rows as they are")
    if rows and path.resolve().parent != FOLDER.resolve():
        print(f"they take effect as {FOLDER / path.name}")


def _target_of(device: "torch.device") -> str:
    from models.kvm.kernels.launch import current_target

    name = current_target(device).name
    if name not in TARGETS:
        raise ConfigError(
            f"bench kvm --tune: this GPU has no rows of its own; want one of {', '.join(TARGETS)}: "
            "add its architecture to TARGETS in models/kvm/kernels/tuning.py"
        )
    return name


def search(trials: Trials, deadline: float, path: Path, device_name: str) -> list[MeasuredRow]:
    """Rows that are faster, each written as it is found."""
    rows = []
    for found in Search(trials, deadline, _say).run():
        rows.append(_row(found, trials, device_name))
        write_rows(path, rows[-1:])
    return rows


def _say(line: str) -> None:
    print(f"kvm-dist: {line}", file=sys.stderr, flush=True)


def _row(found: Found, trials: Trials, device_name: str) -> MeasuredRow:
    shape = trials.shape
    row = Row(found.kernel, trials.target.name, shape.block_d, shape.element_bytes, found.tile, measured=True)
    return MeasuredRow(row, found.seconds, found.default_seconds, device_name, version("triton"))


def found_table(rows: Sequence[MeasuredRow]) -> Table:
    table = Table(title="faster tiles", title_justify="left")
    for name in ("kernel", "D", "ms before", "ms", "tile"):
        table.add_column(name, justify="left" if name in ("kernel", "tile") else "right")
    for one in rows:
        tile = one.row.tile
        table.add_row(
            one.row.kernel,
            str(one.row.widest),
            f"{1e3 * one.default_seconds:.3f}",
            f"{1e3 * one.seconds:.3f}",
            f"{tile.block_m} x {tile.block_n}, {tile.warps} warps, {tile.stages} stages",
        )
    return table
