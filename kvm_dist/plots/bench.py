"""The picture of `bench kvm`: time against length on log axes."""

from pathlib import Path
from statistics import median

from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from kvm_dist.bench.results import Results
from kvm_dist.bench.setting import BUDGETS, FULL_ATTENTION
from kvm_dist.plots.canvas import BLUE, GREEN, INK, RED, new_figure, quiet, save

_COLORS = dict(zip((*BUDGETS, FULL_ATTENTION), (GREEN, BLUE, RED), strict=True))


def time_against_length(results: Results, out: Path) -> Path:
    """Forward and backward of KVM with both budgets and of full attention, over the tokens of a sequence."""
    setting = results.setting
    figure = new_figure(
        "KVM: time against sequence length",
        f"forward + backward, {setting.heads} heads of {setting.width}, chunk {setting.chunk}, float32, "
        f"CPU threads: {setting.threads}, {results.machine.get('processor', 'this machine')}",
    )
    axes = figure.add_axes((0.085, 0.115, 0.745, 0.725))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({one.tokens for one in results.timings})
    for contender, color in _COLORS.items():
        found = sorted(
            (one.tokens, median(one.total)) for one in results.timings if one.contender == contender
        )
        if not found:
            continue
        tokens, seconds = zip(*found, strict=True)
        axes.plot(tokens, seconds, "o-", color=color, linewidth=2.2, markersize=6)
        axes.annotate(
            _label(results, contender, tokens[-1]),
            (tokens[-1], seconds[-1]),
            xytext=(12, 0),
            textcoords="offset points",
            va="center",
            fontsize=11.5,
            fontweight="bold",
            color=color,
        )
    quiet(axes, "tokens in the sequence (doubling)", "seconds (log scale)")
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.06, y=0.1)
    axes.tick_params(axis="x", labelcolor=INK)
    return save(figure, out)


def _label(results: Results, contender: str, tokens: int) -> str:
    """The name, how it grows, and how much faster than full attention it is where the line ends."""
    lines = [contender]
    exponent, speedup = results.exponent(contender), results.speedup(contender, tokens)
    if exponent is not None:
        lines.append(f"time ~ tokens^{exponent:.2f}")
    if speedup is not None and contender != FULL_ATTENTION:
        lines.append(f"{speedup:.1f}x faster")
    return "\n".join(lines)
