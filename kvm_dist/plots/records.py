"""What pictures of evaluations share: colours and names of checkpoints, and where the legend is."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvm_dist.plots.canvas import AMBER, BLUE, GREEN, INK, RED

_COLOURS = (BLUE, RED, GREEN, AMBER, "#7a4fa3", "#3b8f9e", "#8a5a3c", INK)
Record = Mapping[str, Any]


def label(record: Record) -> str:
    """NAME at step N, and what was changed; a model that was not saved by a run has no step."""
    at = f" at step {record['step']:,}" if record["step"] else ""
    return ", ".join([f"{record['name']}{at}", *record["overrides"]])


def length_label(tokens: float) -> str:
    """512, 4K for 4,096, and 5,000."""
    return f"{tokens / 1024:g}K" if tokens >= 1024 and tokens % 512 == 0 else f"{tokens:,.0f}"


def counted(number: int, thing: str) -> str:
    """1 sample, 2 samples."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def cycled(count: int) -> list[str]:
    """A colour for each of `count` checkpoints."""
    return [_COLOURS[number % len(_COLOURS)] for number in range(count)]


def legend_above(figure: Figure, axes: Axes) -> None:
    """The legend of `axes` between the subtitle and the picture, where no line runs below it."""
    handles, names = axes.get_legend_handles_labels()
    columns = 3 if max(map(len, names)) < 36 else 2 if max(map(len, names)) < 50 else 1
    figure.legend(
        handles,
        names,
        loc="upper left",
        bbox_to_anchor=(0.07, 0.872),
        ncol=columns,
        frameon=False,
        fontsize=10.5,
        labelcolor=INK,
        borderaxespad=0,
    )
