"""`bench kvm --compile-report`: what the kernels compile to, and the least time a GPU could take."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from kvm_dist.bench.setting import BUDGETS
from launch.console import table_console
from models.kvm.kernels.report import (
    CompileRow,
    RooflineRow,
    ShapeClass,
    compile_report,
    roofline,
    shape_classes,
)

ROOFLINE_TOKENS = 32_768


def print_compile_report(
    quick: bool, workers: int, json_path: Path | None, report: Callable[[str, float], None]
) -> None:
    """Compiles every kernel for every target, which takes minutes and no GPU.

    quick: only the published shape. report: is told what was done, and the share that is done.
    """
    floors = {name: roofline(budget, ROOFLINE_TOKENS) for name, budget in BUDGETS.items()}
    classes, ended = shape_classes(every=not quick), 0

    def finished(one: ShapeClass) -> None:
        nonlocal ended
        ended += 1
        report(str(one), ended / len(classes))

    compiled = compile_report(classes, workers, finished)
    if json_path is not None:  # first: a reader of the tables may have enough before their end
        found = {
            "compiled": [row.as_dict() for row in compiled],
            "roofline": {name: [asdict(row) for row in rows] for name, rows in floors.items()},
        }
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    console = table_console()
    for name, rows in floors.items():
        console.print(_roofline(name, rows))
    console.print(_compiled(compiled))
    if json_path is not None:
        print(json_path)


def _compiled(rows: list[CompileRow]) -> Table:
    table = Table(title="every kernel, compiled", title_justify="left")
    left = ("kernel", "target", "inputs", "matrix instructions")
    numbers = ("D", "C", "registers", "spills", "shared KiB", "warps", "instructions", "occupancy at most")
    for name in (*left[:3], *numbers, left[3]):
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        matrix = ", ".join(f"{name} {count}" for name, count in row.matrix_instructions.items() if count)
        table.add_row(
            row.kernel.removesuffix("_kernel") + (f", {row.variant}" if row.variant else ""),
            row.target if row.memory == "buffers" else f"{row.target}, {row.memory}",
            row.dtype,
            *(str(number) for number in (row.width, row.chunk, row.registers, row.spills)),
            f"{row.shared_bytes / 1024:.1f}",
            *(str(number) for number in (row.warps, row.instructions)),
            f"{row.occupancy:.0%}",
            matrix or "-",
        )
    return table


def _roofline(name: str, rows: list[RooflineRow]) -> Table:
    table = Table(
        title=f"{name}: the least time at {ROOFLINE_TOKENS:,} tokens, B=8 H=32 D=128, bfloat16",
        title_justify="left",
    )
    for title in ("kernel", "device", "GFLOP", "MB", "floor, ms", "bound by"):
        table.add_column(title, justify="left" if title in ("kernel", "device", "bound by") else "right")
    for row in rows:
        table.add_row(
            row.kernel,
            row.device,
            f"{row.flops / 1e9:,.1f}",
            f"{row.bytes / 1e6:,.1f}",
            f"{1e3 * row.floor_seconds:.3f}",
            row.bound,
        )
    return table
