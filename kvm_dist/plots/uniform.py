"""The loss of uniform guessing in a picture of losses: a line, and its name where nothing else is."""

import math

from matplotlib.axes import Axes
from matplotlib.text import Annotation

from kvm_dist.plots.canvas import FAINT

_PLACES = (
    (1, 5),
    (1, -5),
    (0, 5),
    (0, -5),
)  # of the name: begin or end of the line, points above or below it
_GAP = 2.0  # pixels between the name and all else


def draw_uniform(axes: Axes, vocab_size: int) -> None:
    """Into axes that have their limits and all other lines and texts."""
    uniform = math.log(vocab_size)
    text = f"uniform guessing: ln {vocab_size:,} = {uniform:.2f}"
    for place in _PLACES:
        name = _name(axes, uniform, text, *place)
        if _is_clear(axes, name):
            break
        name.remove()
    else:
        _name(axes, uniform, text, *_PLACES[0])
    axes.axhline(uniform, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)


def _name(axes: Axes, uniform: float, text: str, side: int, points: int) -> Annotation:
    return axes.annotate(
        text,
        (side, uniform),
        xycoords=("axes fraction", "data"),
        xytext=(0, points),
        textcoords="offset points",
        ha="right" if side else "left",
        va="bottom" if points > 0 else "top",
        color=FAINT,
        fontsize=10.5,
    )


def _is_clear(axes: Axes, name: Annotation) -> bool:
    place = name.get_window_extent().padded(_GAP)
    curves = (line.get_path().transformed(line.get_transform()) for line in axes.lines)
    others = (text.get_window_extent() for text in axes.texts if text is not name)
    return not (
        any(curve.intersects_bbox(place, filled=False) for curve in curves)
        or any(other.overlaps(place) for other in others)
    )
