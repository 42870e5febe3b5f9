"""`bench kvm --device cuda`: first right, then fast, as tables, JSON and a picture."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvm_dist.bench.accelerator import LENGTHS, Measured, goals, measure
from kvm_dist.bench.one_layer import Shape, check
from kvm_dist.bench.pace import Now, Pace
from kvm_dist.exit_codes import ConfigError, CrashError
from launch.console import table_console

if TYPE_CHECKING:
    import torch

SECONDS = 450.0  # of all, compiling and the check included: below eight minutes with what Python imports
QUICK_LENGTHS = (1024, 8192)


def gpu_of(device_name: str, command: str) -> "torch.device":
    """The GPU that a command was given. Raises ConfigError where torch sees none."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"{command} --device {device_name}: torch sees no GPU here; want one to measure on")
    try:
        device = torch.device(device_name)
        torch.cuda.get_device_properties(device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(
            f"{command} --device {device_name}: {error}; want cuda, or cuda:N of {torch.cuda.device_count()}"
        ) from error
    return device


def checked(device: "torch.device", shape: Shape) -> dict[str, float]:
    """Errors of the kernels on this device. Raises CrashError if they are wrong."""
    try:
        errors = check(device, shape)
    except ArithmeticError as error:
        raise CrashError(str(error)) from error
    worst = max(errors, key=errors.__getitem__)
    print(f"kvm-dist: right on {device}: largest error {errors[worst]:.1e} ({worst})", file=sys.stderr)
    return errors


def bench_accelerator(
    device_name: str,
    lengths: Sequence[int],
    quick: bool,
    json_path: Path | None,
    now: Now = time.perf_counter,
) -> None:
    """Check the results on this device against float64, measure, print, and write JSON and a picture.

    What does not fit into SECONDS by `now` is left out, and named.
    """
    pace = Pace(now() + SECONDS, now)
    if lengths and min(lengths) < 2:
        raise ConfigError(f"bench kvm --tokens {min(lengths)}: want at least 2 tokens on a GPU")
    device = gpu_of(device_name, "bench kvm")
    import torch

    named = torch.cuda.get_device_name(device)
    wanted = tuple(sorted(lengths)) or (QUICK_LENGTHS if quick else LENGTHS)
    with torch.cuda.device(device):
        found: dict[str, Any] = {"device": named, "errors": checked(device, Shape())}
        rows = _measured(device, wanted, pace, found, json_path)
    console = table_console()
    console.print(speed_table(rows, named))
    for goal in goals(rows, named):
        console.print(
            f"{goal.name}: wanted {goal.wanted:g}, got {goal.got:.2f}, {'met' if goal.met else 'not met'}"
        )
    if json_path is not None and rows:
        from kvm_dist.plots.accelerator import accelerator_speed

        print(f"{json_path}\n{accelerator_speed(rows, named, json_path.with_suffix('.png'))}")


def _measured(
    device: "torch.device",
    lengths: tuple[int, ...],
    pace: Pace,
    found: dict[str, Any],
    json_path: Path | None,
) -> list[Measured]:
    """Rows as they come, on stderr and in the JSON: an end halfway loses none of them."""
    rows: list[Measured] = []
    found["left_out"] = []

    def left_out(why: str) -> None:
        found["left_out"].append(why)
        print(f"kvm-dist: left out: {why}", file=sys.stderr, flush=True)

    def write() -> None:
        if json_path is not None:
            found["rows"] = [row.to_dict() for row in rows]
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    for row in measure(device, Shape(), lengths, pace, left_out=left_out):
        rows.append(row)
        said = f"{row.tokens:,} {row.phase} {row.method}: {1e3 * row.seconds:.3f} ms"
        print(f"kvm-dist: {said}", file=sys.stderr, flush=True)
        write()
    write()
    return rows


def speed_table(rows: Sequence[Measured], device_name: str) -> Table:
    """One row for every length, phase and method."""
    shape = Shape()
    table = Table(
        title=f"one layer on {device_name}, {str(shape.dtype)[6:]}, B={shape.batch} H={shape.heads} "
        f"D={shape.head_dim} C={shape.chunk}",
        title_justify="left",
    )
    for name in ("tokens", "phase", "method", "ms", "times full attention", "share of the roofline"):
        table.add_column(name, justify="left" if name in ("phase", "method") else "right")
    for row in rows:
        table.add_row(
            f"{row.tokens:,}",
            row.phase,
            row.method,
            f"{1e3 * row.seconds:.3f}",
            "-" if row.ratio is None else f"{row.ratio:.2f}",
            "-" if row.floor_seconds is None else f"{row.floor_seconds / row.seconds:.0%}",
        )
    return table
