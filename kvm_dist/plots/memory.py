"""What a memory does over a document: how it grows and fills, what is read, and which slots by whom."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import FuncFormatter, PercentFormatter

from kvm_dist.plots.canvas import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    INK,
    RED,
    label_counts,
    new_figure,
    plain,
    quiet,
    save,
)
from kvm_dist.plots.memory_slots import slot_map, slot_texts

SINKS, STATE, WINDOW = AMBER, GREEN, "#c9d6ea"
_DEPTH = LinearSegmentedColormap.from_list("depth", ["#8fc7b0", GREEN, "#123f52"])
_LAYERS_NAMED = 6
_COUNTS = FuncFormatter(lambda value, _: plain(value))

Record = Mapping[str, Any]


def draw(records: Sequence[Record], out: Path) -> list[Path]:
    """The pictures of one record: `out`, and beside it those of reads, slots and the slots' texts.

    Memories are not compared in one picture: of several records nothing is drawn.
    """
    if len(records) > 1:
        return []
    details = records[0]["details"]

    def beside(name: str) -> Path:
        return out.with_name(f"{out.stem}-{name}{out.suffix}")

    pictures = [growth(details, out), reads(details, beside("reads"))]
    if details["heat"]["mass"]:
        pictures.append(slot_map(details, beside("slots")))
        pictures.append(slot_texts(details, beside("texts")))
    return pictures


def growth(details: Mapping[str, Any], out: Path) -> Path:
    """Slots against tokens, what was appended and merged, how full the slots are, and how alike."""
    figure = new_figure("How the memory grows and fills", details["subtitle"])
    grid = figure.add_gridspec(
        2, 2, left=0.08, right=0.965, bottom=0.095, top=0.815, hspace=0.5, wspace=0.2, height_ratios=(1.35, 1)
    )
    _slots_against_tokens(figure.add_subplot(grid[0, 0]), details["growth"])
    _fullness(figure.add_subplot(grid[0, 1]), details["layers"])
    _appended_and_merged(figure.add_subplot(grid[1, 0]), details["growth"])
    _likeness(figure.add_subplot(grid[1, 1]), details["layers"])
    return save(figure, out)


def reads(details: Mapping[str, Any], out: Path) -> Path:
    """One panel a layer, first to last: shares of attention, or how a state of another kind grows."""
    panels = _panels(details)
    columns = 1 if len(panels) == 1 else 2 if len(panels) <= 4 else 3 if len(panels) <= 9 else 4
    rows = -(-len(panels) // columns)
    figure = new_figure("Where attention goes", details["subtitle"])
    grid = figure.add_gridspec(
        rows, columns, left=0.075, right=0.965, bottom=0.095, top=0.765, hspace=0.62, wspace=0.28
    )
    for place, (title, panel) in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(place, columns)])
        if "measure" in panel:
            _other_state(axes, panel)
        else:
            _shares(axes, panel)
        axes.set_title(title, loc="left", fontsize=11 if columns < 4 else 8.5, color=INK, pad=6)
        quiet(axes, "tokens read" if place >= len(panels) - columns else "", "")
        axes.set_xlim(0, details["growth"]["positions"][-1])
        axes.locator_params(axis="x", nbins=5 if columns < 4 else 3)
        label_counts(axes)
        if rows > 2:
            axes.tick_params(labelsize=8.5, pad=3)
    for x, name, color in ((0.075, "sinks", SINKS), (0.155, "other slots", STATE), (0.28, "window", WINDOW)):
        figure.text(x, 0.835, "■", fontsize=13, color=color, va="center")
        figure.text(x + 0.021, 0.837, name, fontsize=11.5, color=INK, va="center")
    return save(figure, out)


def _panels(details: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    found = [(layer["index"], layer["name"], layer) for layer in details["layers"]]
    found += [(int(name.split(".")[0]), name, one) for name, one in details["other_states"].items()]
    return [
        (f"layer {index + 1}: {name.split('.')[1]}, {panel.get('measure') or _from_slots(panel)}", panel)
        for index, name, panel in sorted(found, key=lambda one: one[0])
    ]


def _shares(axes: Axes, layer: Mapping[str, Any]) -> None:
    parts = [[one or 0.0 for one in layer[name]] for name in ("sinks", "state", "window")]
    positions = [0, *layer["positions"]]
    first = [[part[0], *part] for part in parts]
    axes.stackplot(positions, first, colors=[SINKS, STATE, WINDOW], step="pre", linewidth=0)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _from_slots(layer: Mapping[str, Any]) -> str:
    """The share of its attention that goes to slots, a mean over heads and tokens."""
    shares = layer["by_head"]
    heads = [sinks + slots for sinks, slots in zip(shares["sinks"], shares["state"], strict=True)]
    return f"{sum(heads) / max(len(heads), 1):.0%} from slots"


def _other_state(axes: Axes, state: Mapping[str, Any]) -> None:
    values = [float("nan") if one is None else one for one in state["values"]]
    axes.plot(state["positions"], values, "o-", color=RED, linewidth=1.8, markersize=3.5)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(_COUNTS)


def _slots_against_tokens(axes: Axes, found: Mapping[str, Any]) -> None:
    tokens, slots = found["positions"], found["slots"]
    last, held = tokens[-1], slots[-1]
    axes.plot([0, last], [0, last], color=RED, linewidth=1.6)
    axes.annotate("full attention keeps every token", (last * 0.04, last * 0.9), color=RED, fontsize=10.5)
    axes.step(tokens, slots, where="pre", color=GREEN, linewidth=2.4)
    axes.plot(tokens, found["budget"], color=INK, linewidth=1, linestyle=(0, (3, 3)))
    axes.fill_between(tokens, slots, step="pre", color=GREEN, alpha=0.12, linewidth=0)
    axes.annotate(
        f"{held:,} slots\n(dashed: the budget)",
        (last, held),
        xytext=(0, 9),
        textcoords="offset points",
        ha="right",
        color=GREEN,
        fontsize=10.5,
        fontweight="bold",
    )
    axes.set_title("slots and tokens", loc="left", fontsize=12, color=INK, pad=8)
    quiet(axes, "tokens read", "")
    axes.set_ylim(0, last * 1.04)
    axes.yaxis.set_major_formatter(_COUNTS)
    _counted(axes, last)


def _appended_and_merged(axes: Axes, found: Mapping[str, Any]) -> None:
    folds = found["folds"]
    edges = [folds[0]["start"], *(fold["stop"] for fold in folds)] if folds else [0, 1]
    shares = [fold["appended"] / (fold["stop"] - fold["start"]) for fold in folds] or [0.0]
    axes.stairs([1.0] * len(shares), edges, fill=True, color=WINDOW, linewidth=0)
    axes.stairs(shares, edges, fill=True, color=GREEN, linewidth=0)
    appended = sum(fold["appended"] for fold in folds)
    merged = sum(fold["merged"] for fold in folds)
    axes.set_title("what became of the tokens", loc="left", fontsize=12, color=INK, pad=8)
    for text, place, color in (
        (f"{merged:,} tokens merged", 0.9, BLUE),
        (f"{appended:,} opened a slot", 0.72, GREEN),
    ):
        axes.text(0.975, place, text, **_in_axes(axes), fontsize=10.5, color=color, fontweight="bold")
    quiet(axes, "position of the token", "")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _counted(axes, edges[-1])


def _fullness(axes: Axes, layers: Sequence[Mapping[str, Any]]) -> None:
    for place, layer in enumerate(layers):
        found = layer["tokens_per_slot"]
        axes.plot(found["ranks"], found["ranked"], color=_color(place, layers), linewidth=1.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title("tokens in a slot, fullest slot first", loc="left", fontsize=12, color=INK, pad=8)
    quiet(axes, "rank of the slot", "")
    label_counts(axes)
    axes.yaxis.set_major_formatter(_COUNTS)
    axes.minorticks_off()
    _name_layers(axes, layers)


def _likeness(axes: Axes, layers: Sequence[Mapping[str, Any]]) -> None:
    lowest, banded = 1.0, len(layers) <= 3
    for place, layer in enumerate(layers):
        found, color = layer["similarity"], _color(place, layers)
        if not found["positions"]:
            continue
        axes.plot(found["positions"], found["mean"], color=color, linewidth=1.8)
        if banded:
            axes.fill_between(
                found["positions"], found["q10"], found["q90"], color=color, alpha=0.14, linewidth=0
            )
        lowest = min(lowest, *(found["q10"] if banded else found["mean"]))
    axes.set_title("cosine of merged tokens and their slots", loc="left", fontsize=12, color=INK, pad=8)
    if banded:
        axes.text(0.985, 0.09, "bands: 10 to 90 % of the tokens", **_in_axes(axes), fontsize=10, color=FAINT)
    quiet(axes, "position of the token", "")
    axes.set_ylim(min(lowest - 0.05, 0.95), 1)
    _counted(axes)


def _color(place: int, layers: Sequence[Any]) -> Any:
    return _DEPTH(place / max(len(layers) - 1, 1))


def _name_layers(axes: Axes, layers: Sequence[Mapping[str, Any]]) -> None:
    """Written in their colours; of many only the first and the last."""
    shown = range(len(layers)) if len(layers) <= _LAYERS_NAMED else (0, len(layers) - 1)
    for row, place in enumerate(shown):
        axes.text(
            0.985,
            0.93 - 0.1 * row,
            f"layer {layers[place]['index'] + 1}",
            **_in_axes(axes),
            fontsize=10.5,
            color=_color(place, layers),
            fontweight="bold",
        )


def _in_axes(axes: Axes) -> dict[str, Any]:
    """For text that ends at a place of the panel, in shares of its sides."""
    return {"transform": axes.transAxes, "ha": "right", "va": "center"}


def _counted(axes: Axes, last: float | None = None) -> None:
    axes.set_xlim(0, last)
    axes.locator_params(axis="x", nbins=6)
    label_counts(axes)
