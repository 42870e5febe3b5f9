"""Loss against the position in the sequence."""

import math
from collections.abc import Sequence
from pathlib import Path

from kvm_dist.plots.canvas import FAINT, GREEN, INK, label_counts, mark, new_figure, quiet, save


def position_loss(
    positions: Sequence[float],
    losses: Sequence[float],
    out: Path,
    *,
    title: str = "Loss by position in the sequence",
    unit: str = "nats per token",
    subtitle: str = "mean loss of held-out sequences",
) -> Path:
    """Loss against the position in the sequence, doubling from left to right: falls while context helps."""
    figure = new_figure(title, subtitle)
    axes = figure.add_axes((0.075, 0.115, 0.85, 0.725))
    axes.set_xscale("log", base=2)
    axes.plot(
        positions, losses, "o", color=GREEN, alpha=0.3, markersize=4, markeredgewidth=0, label="each block"
    )
    centres, means = half_octaves(positions, losses)
    axes.plot(centres, means, "o-", color=GREEN, linewidth=2.2, markersize=6, label="means over half-octaves")
    mean = sum(losses) / len(losses)
    axes.axhline(mean, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        f"mean {mean:.3f}",
        (0, mean),
        xycoords=("axes fraction", "data"),
        xytext=(2, 5),
        textcoords="offset points",
        color=FAINT,
        fontsize=10.5,
    )
    mark(axes, centres[-1], means[-1], GREEN)
    axes.legend(loc="lower left", frameon=False, fontsize=11.5, labelcolor=INK)
    quiet(axes, "position in the sequence, tokens (doubling)", f"loss, {unit}")
    axes.margins(x=0.06, y=0.14)
    label_counts(axes)
    return save(figure, out)


def half_octaves(positions: Sequence[float], losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """Mean position and mean loss of every factor of sqrt(2) of positions: late blocks are many and noisy."""
    bins: dict[int, list[tuple[float, float]]] = {}
    for position, loss in zip(positions, losses, strict=True):
        bins.setdefault(round(2 * math.log2(position)), []).append((position, loss))
    columns = [tuple(zip(*bins[key], strict=True)) for key in sorted(bins)]
    return [sum(xs) / len(xs) for xs, _ in columns], [sum(ys) / len(ys) for _, ys in columns]
