"""One head's slots: a map of when each is read, and a table of the texts that they are made of."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unicodedata import combining, east_asian_width

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from kvm_dist.plots.canvas import FAINT, GREEN, GRID, INK, RED, label_counts, new_figure, plain, quiet, save

_SHADES = LinearSegmentedColormap.from_list(
    "reads", ["#ffffff", "#d5ebe1", "#7dbfa4", GREEN, "#123f52"]
).with_extremes(bad="#eef0f4")
_TIMES = (0.001, 0.01, 0.1, 0.5, 1, 2, 4, 10, 30, 100, 1000)
_LABELS = 10
_ROWS = 9
_MONO: dict[str, Any] = {"family": "DejaVu Sans Mono", "parse_math": False, "va": "center"}
_MONO_WIDTH = 0.602  # of a character, in units of the font size
_VISIBLE = str.maketrans({"\n": "↵", "\t": "→", "\r": "↵", "\0": "∅"})


def slot_map(details: Mapping[str, Any], out: Path) -> Path:
    """Slots by the time they were opened, tokens read from left to right; dark where a slot is read much."""
    heat = details["heat"]
    figure = new_figure(f"Which slots are read, and when: {_head(details)}", details["heat_subtitle"])
    axes = figure.add_axes((0.075, 0.115, 0.62, 0.725))
    reads = _times_an_even_share(heat)
    low, high = _shading(reads)
    mesh = axes.pcolormesh(
        heat["token_edges"],
        heat["slot_edges"],
        np.ma.masked_invalid(reads),
        cmap=_SHADES,
        norm=LogNorm(low, high, clip=True),
        rasterized=True,
    )
    axes.set_xlim(heat["token_edges"][0], heat["token_edges"][-1])
    axes.set_ylim(0, heat["slot_edges"][-1])
    quiet(axes, "tokens read", "slot, by the time it was opened")
    axes.grid(visible=False)
    label_counts(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    _name_slots(figure, axes, details["slots"][:_LABELS])
    bar = figure.colorbar(mesh, cax=figure.add_axes((0.73, 0.06, 0.235, 0.018)), orientation="horizontal")
    bar.outline.set_visible(False)
    shown = [times for times in _TIMES if low <= times <= high]
    bar.set_ticks(shown, labels=[f"{times:g}" for times in shown], minor=False)
    bar.ax.minorticks_off()
    bar.ax.tick_params(colors=FAINT, labelsize=9, length=0, pad=4)
    figure.text(0.73, 0.095, "reads, times an even share", va="center", fontsize=9.5, color=FAINT)
    return save(figure, out)


def _times_an_even_share(heat: Mapping[str, Any]) -> np.ndarray:
    """Each cell against what every slot would get if all slots of its block were read alike; NaN before."""
    mass = np.array([[np.nan if one is None else one for one in row] for row in heat["mass"]])
    slots = np.diff(heat["slot_edges"])[:, None] * np.isfinite(mass)
    even = np.nansum(mass * slots, axis=0) / np.maximum(slots.sum(axis=0), 1)
    relative: np.ndarray = mass / np.where(even > 0, even, 1)
    return relative


def _shading(reads: np.ndarray) -> tuple[float, float]:
    """From seldom to often by the cells themselves, but no shades for differences of a few percent."""
    found = reads[np.isfinite(reads) & (reads > 0)]
    low, high = np.quantile(found, (0.05, 0.995)) if found.size else (1.0, 1.0)
    return max(min(float(low), 0.5), 1e-3), max(float(high), 2.0)


def slot_texts(details: Mapping[str, Any], out: Path) -> Path:
    """The most read slots: the token that opened each, and the tokens merged into it that are most alike."""
    figure = new_figure(f"What the most read slots are made of: {_head(details)}", details["heat_subtitle"])
    for x, text in ((0.075, "slot"), (0.15, "reads"), (0.215, "tokens"), (0.29, "opened by")):
        figure.text(x, 0.835, text, fontsize=10.5, color=FAINT, va="center")
    figure.text(
        0.635, 0.835, "merged into it, the most similar first", fontsize=10.5, color=FAINT, va="center"
    )
    height = 0.765 / _ROWS
    for row, slot in enumerate(details["slots"][:_ROWS]):
        y = 0.81 - height * (row + 0.5)
        merged_tokens = slot["most_similar"]
        _line(figure, (0.075, 0.965), (y + height / 2, y + height / 2), GRID)
        name = f"{slot['slot']:,}" + (" sink" if slot["sink"] else "")
        figure.text(0.075, y, name, fontsize=10.5, color=INK, va="center", fontweight="bold")
        share = slot["share_of_state_reads"]
        figure.text(0.15, y, f"{share:.1%}", fontsize=10.5, color=GREEN, va="center", fontweight="bold")
        figure.text(0.215, y, f"{slot['tokens']:,}", fontsize=10.5, color=INK, va="center")
        _token(figure, 0.29, y, slot["opened_by"], 9.5, 18)
        for place, merged in enumerate(merged_tokens):
            level = y + height * ((len(merged_tokens) - 1) / 2 - place) * 0.29
            _token(figure, 0.635, level, merged, 8, 16)
            figure.text(
                0.965,
                level,
                f"{merged['similarity']:.2f}",
                fontsize=8.5,
                color=FAINT,
                va="center",
                ha="right",
            )
        if not merged_tokens:
            figure.text(0.635, y, "nothing", fontsize=9.5, color=FAINT, va="center")
    return save(figure, out)


def _head(details: Mapping[str, Any]) -> str:
    return f"layer {details['heat']['layer'] + 1}, head {details['heat']['head'] + 1}"


def _name_slots(figure: Figure, axes: Axes, slots: Sequence[Mapping[str, Any]]) -> None:
    """Beside the map, where the most read slots lie, the tokens that opened them."""
    bottom, height = axes.get_position().y0, axes.get_position().height
    top_slot = axes.get_ylim()[1]
    ordered = sorted(slots, key=lambda one: one["slot"])
    wanted = [bottom + height * (one["slot"] + 0.5) / top_slot for one in ordered]
    placed = _spread(wanted, 0.042, bottom + 0.03, bottom + height)
    for slot, at, y in zip(ordered, wanted, placed, strict=True):
        _line(figure, (0.698, 0.722), (at, y), FAINT)
        _token(figure, 0.728, y, slot["opened_by"], 8, 14)
    above = bottom + height + 0.022
    figure.text(0.728, above, "the most read slots, opened by", fontsize=9.5, color=FAINT, va="center")


def _spread(wanted: Sequence[float], gap: float, lowest: float, highest: float) -> list[float]:
    """Heights near the wanted ones, in order and at least `gap` apart, pushed up and then down again."""
    placed: list[float] = []
    for height in wanted:
        placed.append(max(height, placed[-1] + gap if placed else lowest))
    limit = highest
    for place in reversed(range(len(placed))):
        placed[place] = min(placed[place], limit)
        limit = placed[place] - gap
    return placed


def _token(figure: Figure, x: float, y: float, text: Mapping[str, Any], size: float, around: int) -> None:
    """A token between what stands around it, in a colour of its own, always at the same place."""
    width = _MONO_WIDTH * size / 72 / figure.get_figwidth()
    before, token, after = (text[name].translate(_VISIBLE) for name in ("before", "text", "after"))
    token = _fitting(token, 2 * around) or "·"
    middle, before = x + width * around, _fitting(before[::-1], around)[::-1]
    figure.text(middle, y, before, fontsize=size, color=FAINT, ha="right", **_MONO)
    figure.text(middle, y, token, fontsize=size, color=RED, fontweight="bold", **_MONO)
    after = _fitting(after, around + 1 - _cells(token))
    figure.text(middle + width * _cells(token), y, after, fontsize=size, color=FAINT, **_MONO)


def _cells(text: str) -> int:
    """Places of one letter that `text` takes: two for a wide letter, none for one that stands on another."""
    return sum(
        0 if combining(letter) else 2 if east_asian_width(letter) in ("W", "F") else 1 for letter in text
    )


def _fitting(text: str, cells: int) -> str:
    """The begin of `text`, as far as it fits."""
    while text and _cells(text) > cells:
        text = text[:-1]
    return text


def _line(figure: Figure, x: tuple[float, float], y: tuple[float, float], color: str) -> None:
    figure.add_artist(Line2D(x, y, linewidth=0.8, color=color))
