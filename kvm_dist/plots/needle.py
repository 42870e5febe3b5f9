"""Heat maps of needles found, by length and depth; of several checkpoints the share found at each length."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from kvm_dist.plots.canvas import FAINT, INK, new_figure, quiet, save
from kvm_dist.plots.records import Record, counted, cycled, label, legend_above, length_label

_SHARES = LinearSegmentedColormap.from_list("share found", ["#f2c7c4", "#fbeecb", "#8cc9a4", "#1f7a5a"])
_MEANINGS = {
    "S1": "S1: number, repeated text",
    "S2": "S2: number in a text",
    "S3": "S3: UUID in a text",
}
_MOST_NUMBERS = 12  # columns of a panel whose fields still hold a number


def draw(records: Sequence[Record], out: Path) -> Path:
    """A panel for each needle: of one record a heat map, of several one line each over the lengths."""
    needles = list(dict.fromkeys(cell["needle"] for record in records for cell in record["details"]["cells"]))
    figure = new_figure(_title(records), _subtitle(records))
    several = len(records) > 1
    top, right = (0.74, 0.965) if several else (0.78, 0.915)
    grid = figure.add_gridspec(
        1, len(needles), left=0.085, right=right, bottom=0.115, top=top, wspace=0.14 if several else 0.1
    )
    for column, needle in enumerate(needles):
        axes = figure.add_subplot(grid[0, column])
        if several:
            _lines(axes, records, needle)
        else:
            _heat_map(axes, records[0], needle)
        axes.set_title(
            _MEANINGS.get(needle, needle), loc="left", fontsize=11.5, color=INK, pad=10 if several else 24
        )
        if column:
            axes.set_yticklabels([])
            axes.set_ylabel("")
    if several:
        legend_above(figure, figure.axes[0])
    else:
        _scale(figure)
    return save(figure, out)


def _lines(axes: Axes, records: Sequence[Record], needle: str) -> None:
    for record, colour in zip(records, cycled(len(records)), strict=True):
        cells = [cell for cell in record["details"]["cells"] if cell["needle"] == needle]
        lengths = sorted({cell["tokens"] for cell in cells})
        shares = [_share([cell for cell in cells if cell["tokens"] == length]) for length in lengths]
        axes.plot(lengths, shares, "o-", color=colour, linewidth=2, markersize=5, label=label(record))
    every = sorted({length for record in records for length in record["settings"]["lengths"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(every, [length_label(length) for length in every])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.1)
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    quiet(axes, "tokens", "needles found")


def _share(cells: Sequence[Mapping[str, Any]]) -> float:
    return sum(cell["found"] for cell in cells) / sum(cell["samples"] for cell in cells)


def _heat_map(axes: Axes, record: Record, needle: str) -> None:
    """Fields, the mean of every length above them, and where the training context ends."""
    cells = [cell for cell in record["details"]["cells"] if cell["needle"] == needle]
    lengths = sorted({cell["tokens"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    shares = np.full((len(depths), len(lengths)), np.nan)
    for cell in cells:
        place = depths.index(cell["depth"]), lengths.index(cell["tokens"])
        shares[place] = cell["found"] / cell["samples"]
    axes.imshow(shares, cmap=_SHARES, vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(lengths)), [length_label(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("tokens", color=FAINT, fontsize=11, labelpad=6)
    axes.set_ylabel("depth of the needle", color=FAINT, fontsize=11, labelpad=8)
    _white_gaps(axes, shares)
    for column in range(len(lengths)):
        axes.annotate(
            f"{np.nanmean(shares[:, column]):.0%}",
            (column, -0.5),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=11,
            fontweight="bold",
            color=INK,
        )
    if len(lengths) <= _MOST_NUMBERS:
        _numbers(axes, shares)
    seen = sum(length <= (record["settings"]["training_context"] or 0) for length in lengths)
    if 0 < seen < len(lengths):
        axes.axvline(seen - 0.5, color=INK, linewidth=1.6, linestyle=(0, (3, 2)))


def _white_gaps(axes: Axes, shares: np.ndarray) -> None:
    rows, columns = shares.shape
    axes.set_xticks(np.arange(columns - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(rows - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.6)
    axes.tick_params(which="both", colors=FAINT, labelsize=10, length=0, pad=5)
    for side in axes.spines.values():
        side.set_visible(False)


def _numbers(axes: Axes, shares: np.ndarray) -> None:
    for (row, column), share in np.ndenumerate(shares):
        if np.isfinite(share):
            dark = sum(to_rgb(_SHARES(share))) < 1.5
            axes.text(
                column,
                row,
                f"{100 * share:.0f}",
                ha="center",
                va="center",
                fontsize=9.5,
                color="white" if dark else INK,
            )


def _scale(figure: Figure) -> None:
    axes = figure.add_axes((0.93, 0.115, 0.013, 0.665))
    axes.imshow(np.linspace(1, 0, 128)[:, None], cmap=_SHARES, vmin=0, vmax=1, aspect="auto")
    axes.set_xticks([])
    axes.set_yticks([0, 63.5, 127], ["100%", "50%", "0%"])
    axes.yaxis.tick_right()
    axes.tick_params(colors=FAINT, labelsize=9.5, length=0, pad=4)
    for side in axes.spines.values():
        side.set_visible(False)


def _title(records: Sequence[Record]) -> str:
    if len(records) > 1:
        return "Needles found in a haystack"
    return f"{label(records[0])}: needles found"


def _subtitle(records: Sequence[Record]) -> str:
    settings = records[0]["settings"]
    if len(records) > 1:
        samples, depths = counted(settings["samples"], "sample"), len(settings["depths"])
        return f"{samples} at each of {depths} depths" if depths > 1 else f"{samples} at one depth"
    context = settings["training_context"] or 0
    line = ""
    if min(settings["lengths"]) <= context < max(settings["lengths"]):
        line = f"; dashed: the training context of {context:,} tokens ends"
    return f"share of {counted(settings['samples'], 'sample')} a field; above: the mean of each length{line}"
