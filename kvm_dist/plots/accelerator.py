"""The picture of `bench kvm --device cuda`: time against length, one panel a phase, floors dashed."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvm_dist.bench.accelerator import REPLAYED, Measured
from kvm_dist.bench.setting import BUDGETS, FULL_ATTENTION
from kvm_dist.plots.canvas import BLUE, GREEN, INK, RED, new_figure, quiet, save

_COLORS = dict(zip((*BUDGETS, FULL_ATTENTION), (GREEN, BLUE, RED), strict=True))
_PHASES = {
    "prefill": "prefill",
    "backward": "backward",
    "decode": "decode, one token",
    REPLAYED: "one token, CUDA graph",
}


def accelerator_speed(rows: Sequence[Measured], device_name: str, out: Path) -> Path:
    """Milliseconds of every phase and method over lengths; dashed: the least that the device allows."""
    figure = new_figure("KVM against full attention", f"one layer on {device_name}; dashed: roofline")
    shown = {phase: title for phase, title in _PHASES.items() if any(row.phase == phase for row in rows)}
    grid = figure.add_gridspec(1, len(shown), left=0.09, right=0.975, bottom=0.115, top=0.8, wspace=0.3)
    for column, (phase, title) in enumerate(shown.items()):
        axes = figure.add_subplot(grid[0, column])
        _panel(axes, [row for row in rows if row.phase == phase])
        axes.set_title(title, loc="left", fontsize=12, color=INK, pad=8)
        quiet(axes, "tokens", "milliseconds" if column == 0 else "")
        if column == 0:
            axes.legend(loc="upper left", frameon=False, fontsize=11, labelcolor=INK)
    return save(figure, out)


def _panel(axes: Axes, rows: Sequence[Measured]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for method, color in _COLORS.items():
        own = sorted((row for row in rows if row.method == method), key=lambda row: row.tokens)
        tokens = [row.tokens for row in own]
        axes.plot(tokens, [1e3 * row.seconds for row in own], "o-", color=color, linewidth=2, label=method)
        floors = [(row.tokens, 1e3 * row.floor_seconds) for row in own if row.floor_seconds is not None]
        if floors:
            axes.plot(*zip(*floors, strict=True), color=color, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.xaxis.set_major_locator(FixedLocator(sorted({row.tokens for row in rows})))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1024:g}K"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(axis="x", labelsize=9)
