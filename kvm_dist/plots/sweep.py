"""The picture of a sweep: every run's loss, best on top."""

from collections.abc import Sequence
from pathlib import Path

from kvm_dist.plots.canvas import BLUE, FAINT, GREEN, INK, new_figure, quiet, save
from kvm_dist.sweep_results import Member

_MOST_ROWS = 30


def sweep_ranking(name: str, varied: Sequence[str], members: Sequence[Member], out: Path) -> Path:
    """Dots: last validation loss; rings: training loss of runs without one. `members`: best first."""
    found = [(member, member.loss) for member in members if member.loss is not None]
    shown = found[:_MOST_ROWS]
    hidden = len(members) - len(shown)
    missing = f"; {hidden} more are not shown" if hidden else ""
    figure = new_figure(
        f"{name}: {len(found)} of {len(members)} runs compared",
        f"by {', '.join(key.rpartition('.')[2] for key in varied)}; dots: held-out loss, rings: training loss"
        f"{missing}",
    )
    axes = figure.add_axes((0.30, 0.115, 0.62, 0.725))
    for row, (member, loss) in enumerate(shown):
        color = GREEN if row == 0 else BLUE
        face = color if member.validation_loss is not None else "white"
        axes.plot([loss], [row], "o", color=color, markerfacecolor=face, markersize=9)
        axes.annotate(
            f"{loss:.4f}", (loss, row), xytext=(9, 0), textcoords="offset points", va="center", color=INK
        )
    quiet(axes, "loss in nats per token", "")
    axes.grid(axis="x", color=FAINT, alpha=0.2)
    axes.set_yticks(range(len(shown)), [_label(varied, member) for member, _ in shown], color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.15, y=0.06)
    return save(figure, out)


def _label(varied: Sequence[str], member: Member) -> str:
    pairs = zip(varied, member.values, strict=True)
    text = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in pairs)
    return text if len(text) <= 44 else text[:43] + "…"
