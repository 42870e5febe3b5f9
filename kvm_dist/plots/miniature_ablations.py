"""Ablations as rows of dots: one for each seed, beside their mean."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvm_dist.plots.canvas import BLUE, FAINT, GREEN, INK, new_figure, quiet, save


def ablation_rows(
    panels: Mapping[str, Mapping[str, Sequence[float]]], labels: Mapping[str, str], out: Path, subtitle: str
) -> Path:
    """panels: title -> model -> a value for each seed, the whole operator first; labels: of the x axes."""
    figure = new_figure("Key-Value Means without one of its parts", subtitle)
    width = (0.8 - 0.035 * (len(panels) - 1)) / len(panels)
    for column, (title, models) in enumerate(panels.items()):
        axes = figure.add_axes((0.17 + column * (width + 0.035), 0.115, width, 0.69))
        whole = next(iter(models.values()))
        axes.axvline(sum(whole) / len(whole), color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        for row, values in enumerate(models.values()):
            color = BLUE if row else GREEN
            axes.plot(
                values, [row] * len(values), "o", color=color, alpha=0.45, markersize=8, markeredgewidth=0
            )
            axes.plot([sum(values) / len(values)], [row], "|", color=color, markersize=24, markeredgewidth=3)
        axes.set_title(title, fontsize=11.5, color=INK, loc="left", pad=8)
        quiet(axes, labels[title], "")
        axes.set_yticks(range(len(models)), list(models) if column == 0 else [], color=INK)
        axes.invert_yaxis()
        axes.set_xlim(-0.04, 1.04)
        axes.margins(y=0.12)
    return save(figure, out)
