"""Loss against the position in long documents, of one checkpoint or several (arXiv 2605.09877, Fig. 4)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from kvm_dist.plots.canvas import FAINT, mark, new_figure, quiet, save
from kvm_dist.plots.records import Record, cycled, label, legend_above, length_label


def draw(records: Sequence[Record], out: Path) -> Path:
    """A line for each record within one standard error over its documents; of one record also quartiles."""
    figure = new_figure(_title(records), _subtitle(records))
    axes = figure.add_axes((0.075, 0.115, 0.82, 0.665))
    for record, colour in zip(records, cycled(len(records)), strict=True):
        _line(axes, record, colour, quartiles=len(records) == 1)
    _mark_training_context(axes, records)
    tokenizers = {record["model"]["tokenizer"] for record in records}
    unit = "byte" if tokenizers == {"bytes"} else "token"
    quiet(axes, "position in the document, tokens", f"loss, nats per {unit}")
    axes.set_xlim(0, reached := _reached(records))
    axes.set_xticks(range(0, reached + 1, max(reached // 8, 1)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: length_label(value)))
    legend_above(figure, axes)
    return save(figure, out)


def _line(axes: Axes, record: Record, colour: str, quartiles: bool) -> None:
    details = record["details"]
    blocks = {name: np.array(values, float) for name, values in details["blocks"].items()}
    size = details["block_tokens"]
    centres = [(number + 0.5) * size for number in range(len(blocks["mean"]))]
    if quartiles:
        axes.fill_between(
            centres,
            blocks["lower_quartile"],
            blocks["upper_quartile"],
            color=colour,
            alpha=0.12,
            linewidth=0,
            label="the middle half of the documents",
        )
    axes.fill_between(
        centres,
        blocks["mean"] - blocks["standard_error"],
        blocks["mean"] + blocks["standard_error"],
        color=colour,
        alpha=0.28,
        linewidth=0,
        label="one standard error" if quartiles else None,
    )
    dots = "o-" if len(centres) <= 64 else "-"
    last = blocks["mean"][-1]
    name = "mean over documents" if quartiles else f"{label(record)}: {last:.3f} at the end"
    axes.plot(centres, blocks["mean"], dots, color=colour, linewidth=2, markersize=4, label=name)
    if quartiles:
        mark(axes, centres[-1], last, colour)


def _mark_training_context(axes: Axes, records: Sequence[Record]) -> None:
    """A line where training stopped, if documents go on behind it."""
    contexts = {record["settings"]["training_context"] for record in records}
    context = contexts.pop()
    if contexts or context is None or context >= _reached(records):
        return
    axes.axvline(context, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        f"training context {context:,}",
        (context, 0),
        xycoords=("data", "axes fraction"),
        xytext=(6, 8),
        textcoords="offset points",
        color=FAINT,
        fontsize=10.5,
    )


def _reached(records: Sequence[Record]) -> int:
    """The position at which the last block ends."""
    return max(len(one["details"]["blocks"]["mean"]) * one["details"]["block_tokens"] for one in records)


def _title(records: Sequence[Record]) -> str:
    what = "loss by position in long documents"
    return f"{label(records[0])}: {what}" if len(records) == 1 else what.capitalize()


def _subtitle(records: Sequence[Record]) -> str:
    settings, details = records[0]["settings"], records[0]["details"]
    count = settings["documents"]
    return (
        f"{count} held-out {'document' if count == 1 else 'documents'} "
        f"of at least {settings['minimum_tokens']:,} tokens, means over {details['block_tokens']:,} tokens"
    )
