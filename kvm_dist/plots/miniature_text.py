"""Held-out loss of text: by position, and how far each model is above the best."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from kvm_dist.plots.canvas import FAINT, INK, label_counts, new_figure, quiet, save
from kvm_dist.plots.miniature import MODEL_COLORS, Spread, legend_above


def text_by_position(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    totals: Mapping[str, Spread],
    out: Path,
    subtitle: str,
) -> Path:
    """curves: model -> positions and bits per byte; totals: model -> bits per byte above the best."""
    figure = new_figure("Text: loss by position, and the distance to the best model", subtitle)
    axes = figure.add_axes((0.075, 0.115, 0.45, 0.66))
    for color, (model, (positions, bits)) in zip(MODEL_COLORS, curves.items(), strict=False):
        axes.plot(positions, bits, "o-", color=color, linewidth=1.8, markersize=4, label=model)
    quiet(axes, "position in the sequence, bytes", "bits per byte")
    label_counts(axes)
    legend_above(figure, 0.865)
    rows = figure.add_axes((0.69, 0.115, 0.27, 0.66))
    for row, (color, spread) in enumerate(zip(MODEL_COLORS, totals.values(), strict=False)):
        rows.plot([spread.low, spread.high], [row, row], color=color, linewidth=5, alpha=0.25)
        rows.plot([spread.mean], [row], "o", color=color, markersize=9)
    rows.axvline(0, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    quiet(rows, "bits per byte above the best", "")
    rows.set_yticks(range(len(totals)), list(totals), color=INK)
    rows.xaxis.set_major_locator(MaxNLocator(4))
    rows.invert_yaxis()
    rows.margins(y=0.12)
    return save(figure, out)
