"""`bench kvm --device cuda`: first right, then fast, as a table, JSON and a picture."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvm_dist.bench.accelerator import LENGTHS, Measured, Shape, check, measure
from kvm_dist.exit_codes import ConfigError, CrashError

SECONDS = 420.0


def bench_accelerator(device_name: str, lengths: Sequence[int], json_path: Path | None) -> None:
    """Check the results on this device against float64, measure, print, and write JSON and a picture."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"bench kvm --device {device_name}: torch sees no GPU here; leave --device out")
    device = torch.device(device_name)
    named = torch.cuda.get_device_name(device)
    try:
        errors = check(device, Shape())
    except ArithmeticError as error:
        raise CrashError(str(error)) from error
    worst = max(errors, key=errors.__getitem__)
    print(f"kvm-dist: right on {named}: largest error {errors[worst]:.1e} ({worst})", file=sys.stderr)
    rows: list[Measured] = []
    for row in measure(device, Shape(), tuple(sorted(lengths)) or LENGTHS, SECONDS):
        rows.append(row)
        print(
            f"kvm-dist: {row.tokens:,} {row.phase} {row.method}: {1e3 * row.seconds:.3f} ms", file=sys.stderr
        )
    Console().print(speed_table(rows, named))
    if json_path is not None:
        from kvm_dist.plots.accelerator import accelerator_speed

        json_path.parent.mkdir(parents=True, exist_ok=True)
        found = {"device": named, "errors": errors, "rows": [row.to_dict() for row in rows]}
        json_path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{json_path}\n{accelerator_speed(rows, named, json_path.with_suffix('.png'))}")


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
