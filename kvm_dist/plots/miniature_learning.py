"""Training loss of the recall task: a panel for each model, a line for each seed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kvm_dist.plots.canvas import FAINT, INK, new_figure, quiet, save
from kvm_dist.plots.miniature import MODEL_COLORS

_COLUMNS = 3
_LEFT, _RIGHT, _BOTTOM, _TOP = 0.075, 0.965, 0.105, 0.81
_GAP_ACROSS, _GAP_UP = 0.03, 0.1


def learning_curves(
    curves: Mapping[str, Sequence[tuple[Sequence[int], Sequence[float]]]], out: Path, subtitle: str
) -> Path:
    """curves: model -> for each seed its steps and losses."""
    figure = new_figure("When each seed learnt to recall", subtitle)
    rows = -(-len(curves) // _COLUMNS)
    width = (_RIGHT - _LEFT - _GAP_ACROSS * (_COLUMNS - 1)) / _COLUMNS
    height = (_TOP - _BOTTOM - _GAP_UP * (rows - 1)) / rows
    losses = [loss for seeds in curves.values() for _, seed in seeds for loss in seed]
    margin = 0.05 * (max(losses) - min(losses)) or 0.1
    for index, (color, (model, seeds)) in enumerate(zip(MODEL_COLORS, curves.items(), strict=False)):
        left = _LEFT + (index % _COLUMNS) * (width + _GAP_ACROSS)
        bottom = _TOP - height - (index // _COLUMNS) * (height + _GAP_UP)
        axes = figure.add_axes((left, bottom, width, height))
        _panel(axes, seeds, color)
        axes.set_ylim(min(losses) - margin, max(losses) + margin)
        axes.set_title(model, fontsize=11.5, color=INK, loc="left", pad=6)
        last = index + _COLUMNS >= len(curves)
        quiet(axes, "steps" if last else "", "loss, nats" if index % _COLUMNS == 0 else "")
        axes.tick_params(labelbottom=last, labelleft=index % _COLUMNS == 0)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.xaxis.label.set_color(FAINT)
    return save(figure, out)


def _panel(axes: Axes, seeds: Sequence[tuple[Sequence[int], Sequence[float]]], color: str) -> None:
    for steps, losses in seeds:
        axes.plot(steps, losses, color=color, linewidth=1.8, alpha=0.75)
