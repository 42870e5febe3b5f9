"""Recall of the miniature models: against the load, and as maps of load and distance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvm_dist.plots.canvas import AMBER, BLUE, FAINT, GREEN, INK, RED, new_figure, quiet, save

_VIOLET = "#7a4fb0"
MODEL_COLORS = (INK, BLUE, GREEN, AMBER, RED, _VIOLET)
_MAP_COLORS = LinearSegmentedColormap.from_list("recall", ("#f3f5f9", "#9dbfe3", BLUE, "#12305a"))
_LEFT, _RIGHT, _BOTTOM, _TOP = 0.075, 0.965, 0.115, 0.83


@dataclass(frozen=True)
class Spread:
    """A number from several seeds: their mean, the smallest and the largest."""

    mean: float
    low: float
    high: float


def recall_by_load(
    lengths: Mapping[str, Mapping[str, Mapping[int, Spread]]], out: Path, subtitle: str
) -> Path:
    """Accuracy against the number of pairs, a panel for each length, a line for each model.

    lengths: title of a panel -> model -> pairs -> accuracy.
    """
    figure = new_figure("Recall of pairs that are new in every sequence", subtitle)
    width = (_RIGHT - _LEFT - 0.03 * (len(lengths) - 1)) / len(lengths)
    for column, (title, models) in enumerate(lengths.items()):
        axes = figure.add_axes((_LEFT + column * (width + 0.03), _BOTTOM, width, _TOP - _BOTTOM - 0.09))
        for order, (color, (model, points)) in enumerate(zip(MODEL_COLORS, models.items(), strict=False)):
            _line(axes, points, color, model, order)
        _loads(axes, sorted({pairs for points in models.values() for pairs in points}))
        axes.set_title(title, fontsize=11.5, color=INK, loc="left", pad=8)
        quiet(axes, "pairs in the sequence", "share of values recalled" if column == 0 else "")
        axes.set_ylim(-0.02, 1.02)
        if column:
            axes.set_yticklabels([])
    legend_above(figure, _TOP + 0.035)
    return save(figure, out)


def legend_above(figure: Figure, top: float) -> None:
    """The models of the first axes, in a row below the subtitle."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    place = {"loc": "upper left", "bbox_to_anchor": (_LEFT - 0.01, top)}
    figure.legend(handles, labels, ncols=6, frameon=False, fontsize=11, labelcolor=INK, **place)


def _line(axes: Axes, points: Mapping[int, Spread], color: str, label: str, order: int) -> None:
    """Later lines are thinner, so that lines on top of each other are all seen."""
    loads, means = sorted(points), [points[x].mean for x in sorted(points)]
    width, marker = max(4.6 - 0.7 * order, 1.6), max(9.5 - order, 4.5)
    axes.plot(loads, means, "o-", color=color, linewidth=width, markersize=marker, label=label)
    low, high = ([getattr(points[x], end) for x in loads] for end in ("low", "high"))
    axes.fill_between(loads, low, high, color=color, alpha=0.15, linewidth=0)


def _loads(axes: Axes, loads: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(loads)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))


def recall_maps(
    maps: Mapping[str, Mapping[tuple[int, int], float]], tokens: int, out: Path, subtitle: str
) -> Path:
    """A map for each model: accuracy over the distance (across, by octave) and the number of pairs (up).

    maps: model -> (pairs, octave) -> accuracy.
    """
    figure = new_figure(f"What is recalled over which distance, in {tokens:,} tokens", subtitle)
    columns, rows = 3, -(-len(maps) // 3)
    width, height = 0.27, (_TOP - _BOTTOM - 0.09 * (rows - 1)) / rows
    for index, (model, cells) in enumerate(maps.items()):
        left = _LEFT + (index % columns) * (width + 0.03)
        bottom = _TOP - height - (index // columns) * (height + 0.09)
        axes = figure.add_axes((left, bottom, width, height))
        _map(axes, cells)
        axes.set_title(model, fontsize=11.5, color=INK, loc="left", pad=6)
        if index % columns:
            axes.set_yticklabels([])
        else:
            axes.set_ylabel("pairs", color=FAINT, fontsize=11)
        if index + columns >= len(maps):
            axes.set_xlabel("distance in tokens, from", color=FAINT, fontsize=11)
    return save(figure, out)


def _map(axes: Axes, cells: Mapping[tuple[int, int], float]) -> None:
    loads = sorted({pairs for pairs, _ in cells})
    octaves = sorted({octave for _, octave in cells})
    for (pairs, octave), accuracy in cells.items():
        x, y = octaves.index(octave), loads.index(pairs)
        axes.add_patch(_cell(x, y, accuracy))
        color = "white" if accuracy > 0.45 else INK
        axes.text(x, y, f"{100 * accuracy:.0f}", ha="center", va="center", fontsize=8.5, color=color)
    axes.set_xlim(-0.5, len(octaves) - 0.5)
    axes.set_ylim(-0.5, len(loads) - 0.5)
    axes.set_xticks(range(len(octaves)), [str(2**octave) for octave in octaves])
    axes.set_yticks(range(len(loads)), [str(pairs) for pairs in loads])
    axes.tick_params(colors=FAINT, labelsize=9.5, length=0, pad=4)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _cell(x: int, y: int, accuracy: float) -> Rectangle:
    return Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, facecolor=_MAP_COLORS(accuracy), linewidth=0)
