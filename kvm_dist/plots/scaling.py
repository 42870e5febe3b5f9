"""The pictures of `bench scaling`: efficiency against ranks, and the wave that states make over ranks."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvm_dist.bench.scaling.accumulated import Accumulation, Way
from kvm_dist.bench.scaling.cluster import CLUSTERS
from kvm_dist.bench.scaling.extrapolate import BY_HEADS, HEADLINES, IN_PAIRS, WAVE, Modelled, method
from kvm_dist.bench.scaling.measured import Measured
from kvm_dist.bench.scaling.replay import Timeline
from kvm_dist.plots.canvas import AMBER, BLUE, FAINT, GREEN, INK, RED, new_figure, quiet, save

PALE, VIOLET = "#c9d3e3", "#7d5ba6"
# row -> label, color, dash pattern: ours solid, with a dot where micro-batches go in pairs, others dashed
_PAIRS = (0, (6, 1.5, 1, 1.5))
_LINES: dict[str, tuple[str, str, str | tuple[int, tuple[float, ...]]]] = {
    "KVM-256": ("KVM-256", GREEN, "-"),
    "RWKV-7, relay": ("RWKV-7 relay", AMBER, "-"),
    WAVE: ("KVM 16√T", BLUE, "-"),
    f"{WAVE}, {IN_PAIRS.label}": ("KVM 16√T, two ways", BLUE, _PAIRS),
    BY_HEADS: ("KVM 16√T, 2-D", VIOLET, "-"),
    f"{BY_HEADS}, {IN_PAIRS.label}": ("KVM 16√T, 2-D, two ways", VIOLET, _PAIRS),
    "RWKV-7, all-gather": ("RWKV-7 all-gather", AMBER, (0, (4, 2))),
    "LASP-2, all-gather": ("LASP-2", FAINT, (0, (4, 2))),
    "full attention, Ulysses": ("Ulysses", RED, (0, (4, 2))),
    "full attention, ring": ("ring attention", RED, (0, (1, 1))),
}
_OPERATIONS = {
    "route": AMBER,
    "values": AMBER,
    "route, attend": BLUE,
    "attend": BLUE,
    "sum slots": RED,
    "share out": RED,
    "loss": FAINT,
    "last feed-forward, loss": FAINT,
}
_LEGEND = {
    "projections, feed-forward": PALE,
    "attention": BLUE,
    "routing (next rank waits)": AMBER,
    "slot gradients (rank before waits)": RED,
    "loss": FAINT,
}
ROW = 0.78  # height of a rank's row, of 1


def efficiency_against_ranks(rows: Sequence[Modelled], out: Path) -> Path:
    """A panel per device and length: efficiency of every method over the ranks that share one sequence.

    Of the largest micro-batches of each length that were modelled.
    """
    most = {row.tokens: max(other.sequences for other in rows if other.tokens == row.tokens) for row in rows}
    rows = [row for row in rows if row.sequences == most[row.tokens]]
    figure = new_figure(
        "Sharing one sequence over R devices (modelled)",
        "efficiency = one device's step / (R x step of R devices), each method against itself; "
        "7B parameters, bf16, nodes of 8; two ways: a pair of micro-batches at once",
    )
    devices = list(dict.fromkeys(row.device for row in rows))
    lengths = list(dict.fromkeys(row.tokens for row in rows))
    grid = figure.add_gridspec(
        len(devices), len(lengths), left=0.085, right=0.975, bottom=0.095, top=0.755, wspace=0.12, hspace=0.36
    )
    for line, device in enumerate(devices):
        for column, tokens in enumerate(lengths):
            axes = figure.add_subplot(grid[line, column])
            _efficiencies(axes, [row for row in rows if (row.device, row.tokens) == (device, tokens)])
            title = f"{device}, {most[tokens]} x {_short(tokens)} tokens"
            axes.set_title(title, loc="left", fontsize=12, color=INK, pad=7)
            below, left = line == len(devices) - 1, column == 0
            quiet(axes, "sequence ranks" if below else "", "efficiency" if left else "")
            if not left:
                axes.tick_params(labelleft=False)
    handles = [
        Line2D([], [], color=color, linestyle=style, linewidth=2.2, label=label)
        for label, color, style in _LINES.values()
    ]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.068, 0.88), ncols=5, frameon=False,
        fontsize=9.5, labelcolor=INK, handlelength=2.2, columnspacing=1.3, handletextpad=0.5,
    )  # fmt: skip
    return save(figure, out)


def _efficiencies(axes: Axes, rows: Sequence[Modelled]) -> None:
    axes.set_xscale("log", base=2)
    for name, (_, color, style) in _LINES.items():
        points = [
            (row.ranks, row.efficiency) for row in rows if row.label == name and row.efficiency is not None
        ]
        if points:
            ranks, efficiencies = zip(*points, strict=True)
            axes.plot(
                ranks, efficiencies, color=color, linestyle=style, linewidth=2.2, marker="o", markersize=4.5
            )
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.xaxis.set_major_locator(FixedLocator(sorted({row.ranks for row in rows})))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.08)


def wavefront(out: Path, device: str = "H200") -> Path:
    """One row per rank: what it computes when, over a whole step and over its first layers."""
    name, tokens, ranks = HEADLINES[0].method, HEADLINES[0].tokens, HEADLINES[0].ranks
    timeline = method(name).timeline(CLUSTERS[device], tokens, ranks)
    assert timeline is not None, "the headline's method runs"
    figure = new_figure(
        f"The wave of states over {ranks} ranks (modelled)",
        f"{name.replace('*sqrt', '√T')}, {_short(tokens)} tokens on {device}: a step of "
        f"{1e3 * timeline.seconds:,.0f} ms; white: a rank waits",
    )
    grid = figure.add_gridspec(2, 1, left=0.085, right=0.975, bottom=0.095, top=0.775, hspace=0.42)
    first_layers = 1e3 * max(_end_of_layer(timeline, rank, 2) for rank in range(ranks))
    for line, (title, stop) in enumerate(
        (("the whole step", 1e3 * timeline.seconds), ("its first three layers", first_layers))
    ):
        axes = figure.add_subplot(grid[line, 0])
        _rows(axes, timeline, stop, edges=line == 1)
        axes.set_title(title, loc="left", fontsize=12, color=INK, pad=7)
        quiet(axes, "milliseconds" if line else "", "rank")
        axes.grid(visible=False)
    _operation_legend(figure, _LEGEND)
    return save(figure, out)


_WAYS: dict[Way, str] = {
    "one": "all begin on rank 0",
    "turns": "in turns, every second begins on the last rank",
    "pairs": "two ways at once, a pair from both ends",
}


def turns(out: Path, device: str = "H200", micro_batches: int = 4) -> Path:
    """One row per rank, over a step of some micro-batches: in one direction, in turns, in pairs."""
    one = HEADLINES[0]
    steps = {
        way: method(one.method).timeline(
            CLUSTERS[device], one.tokens, one.ranks, Accumulation(micro_batches, way)
        )
        for way in _WAYS
    }
    shown = {way: step for way, step in steps.items() if step is not None}
    plain, pairs = (shown[way].seconds for way in ("one", "pairs"))
    figure = new_figure(
        f"A step of {micro_batches} micro-batches over {one.ranks} ranks (modelled)",
        f"{one.method.replace('*sqrt', '√T')}, {_short(one.tokens)} tokens on {device}; two ways at once "
        f"{1 - pairs / plain:.1%} shorter; white: a rank waits",
    )
    grid = figure.add_gridspec(len(shown), 1, left=0.085, right=0.975, bottom=0.095, top=0.775, hspace=0.55)
    for line, (way, timeline) in enumerate(shown.items()):
        axes = figure.add_subplot(grid[line, 0])
        _rows(axes, timeline, 1e3 * plain, edges=False)
        busy = sum(map(timeline.busy_seconds, range(one.ranks))) / one.ranks / timeline.seconds
        axes.set_title(
            f"{_WAYS[way]}: {1e3 * timeline.seconds:,.0f} ms, {1 - busy:.1%} of it waits",
            loc="left", fontsize=12, color=INK, pad=7,
        )  # fmt: skip
        quiet(axes, "milliseconds" if line == len(shown) - 1 else "", "rank")
        axes.grid(visible=False)
    _operation_legend(figure, _LEGEND)
    return save(figure, out)


def measured_step(measured: Measured, out: Path) -> Path:
    """Two rows per rank: the measured step of median length, and the replay of ranks that ran alone."""
    setting = measured.setting
    figure = new_figure(
        f"A step of {setting.ranks} processes, measured and replayed",
        f"{setting.tokens:,} tokens, {measured.speedup:.2f} times as fast as one process; the replay is "
        f"off by {measured.error:+.1%}; white: a rank waits",
    )
    axes = figure.add_axes((0.125, 0.115, 0.85, 0.66))
    real, replayed = measured.real_timeline, measured.timeline
    both = [row for pair in zip(real.of_rank, replayed.of_rank, strict=True) for row in pair]
    stop = 1e3 * max(real.seconds, replayed.seconds)
    _rows(axes, Timeline(both, []), stop, edges=False)
    names = [f"rank {rank}\n{how}" for rank in range(setting.ranks) for how in ("measured", "replayed")]
    axes.set_yticks(range(len(names)), names)
    quiet(axes, "milliseconds", "")
    axes.grid(visible=False)
    _operation_legend(figure, _LEGEND | {"recurrence": GREEN})
    return save(figure, out)


def _operation_legend(figure: Figure, colors: dict[str, str]) -> None:
    handles = [Patch(color=color, label=label) for label, color in colors.items()]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.07, 0.875), ncols=6, frameon=False,
        fontsize=9.5, labelcolor=INK, handlelength=1.1, columnspacing=1.2, handletextpad=0.5,
    )  # fmt: skip


def _end_of_layer(timeline: Timeline, rank: int, layer: int) -> float:
    return max(
        span.end for work, span in timeline.of_rank[rank] if work.layer == layer and work.phase == "forward"
    )


def _rows(axes: Axes, timeline: Timeline, stop: float, edges: bool) -> None:
    """edges: a thin line around every operation, where there is room for it."""
    for rank, worked in enumerate(timeline.of_rank):
        bars = [(1e3 * span.start, 1e3 * (span.end - span.start)) for _, span in worked]
        colors = [_color(work.name) for work, _ in worked]
        axes.broken_barh(
            bars, (rank - ROW / 2, ROW), facecolors=colors, edgecolor="white", linewidth=0.6 if edges else 0.0
        )
    axes.set_xlim(0, stop)
    axes.set_ylim(len(timeline.of_rank) - 0.5, -0.5)
    axes.yaxis.set_major_locator(FixedLocator(range(len(timeline.of_rank))))


def _color(operation: str) -> str:
    return GREEN if operation.startswith("recurrence") else _OPERATIONS.get(operation, PALE)


def _short(tokens: int) -> str:
    return f"{tokens // 2**20}M" if tokens >= 2**20 else f"{tokens // 1024}K"
