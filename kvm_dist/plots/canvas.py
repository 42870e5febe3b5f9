"""One look for all pictures: 1600 x 1000 pixels, quiet axes, a title that says what is seen."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK, FAINT, GRID = "#1d2433", "#7a8194", "#e4e7ee"
BLUE, RED, GREEN, AMBER = "#2f6db3", "#cf3f52", "#2e8b68", "#c98a1b"
_INCHES, _DOTS_PER_INCH = (10.0, 6.25), 160
_LINE_LETTERS = 112  # of a subtitle at its usual size, from margin to margin


def new_figure(title: str, subtitle: str) -> Figure:
    """A long subtitle is written smaller, so that it ends inside the picture."""
    size = 11 * min(1.0, _LINE_LETTERS / max(len(subtitle), 1))
    figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, facecolor="white")
    figure.text(0.075, 0.945, title, fontsize=17, fontweight="bold", color=INK, va="center")
    figure.text(0.075, 0.895, subtitle, fontsize=size, color=FAINT, va="center")
    return figure


def quiet(axes: Axes, x_label: str, y_label: str) -> None:
    """Grid lines across, no box, labels in the second colour."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=10.5, length=0, pad=6)
    axes.set_xlabel(x_label, color=FAINT, fontsize=11.5, labelpad=8)
    axes.set_ylabel(y_label, color=FAINT, fontsize=11.5, labelpad=8)


def label_counts(axes: Axes) -> None:
    """Whole numbers, 1,000 instead of 1000.0, below the x axis."""
    locator = axes.xaxis.get_major_locator()
    if isinstance(locator, MaxNLocator):
        locator.set_params(integer=True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def plain(value: float) -> str:
    """15,000, 2.5 or 0.002: no two marks of an axis say the same."""
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def save(figure: Figure, out: Path) -> Path:
    """Under a partial name first: whoever looks meanwhile sees the whole old picture."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.partial")
    figure.savefig(partial, format="png")
    partial.replace(out)
    return out


def mark(axes: Axes, x: float, y: float, color: str) -> None:
    """Write the value of a point beside it."""
    axes.annotate(
        f"{y:.3f}",
        (x, y),
        xytext=(9, 0),
        textcoords="offset points",
        va="center",
        fontsize=13,
        fontweight="bold",
        color=color,
    )
