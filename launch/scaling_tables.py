"""The tables of `bench scaling`."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from kvm_dist.bench.scaling.calibrate import operation_seconds
from kvm_dist.bench.scaling.extrapolate import Modelled, Sensitivity
from kvm_dist.bench.scaling.measured import Goal, Measured
from kvm_dist.bench.scaling.results import Results


def tables(results: Results) -> Iterator[Table]:
    if results.measured is not None:
        yield _steps(results.measured, results.machine)
        yield _operations(results.measured)
        yield _counts(results.measured)
    for device in dict.fromkeys(row.device for row in results.modelled):
        for sequences in dict.fromkeys(row.sequences for row in results.modelled):
            yield _modelled([r for r in results.modelled if r.device == device and r.sequences == sequences])
    for device in dict.fromkeys(row.device for row in results.sensitivities):
        yield _sensitivities([row for row in results.sensitivities if row.device == device])
    yield _goals(results.goals())


def _steps(measured: Measured, machine: dict[str, Any]) -> Table:
    setting = measured.setting
    table = _table(
        f"a step of {setting.tokens:,} tokens, {measured.alone[0]['parameters'] / 1e6:.1f}M parameters, "
        f"layers {' '.join(setting.layers)}, {setting.ranks} processes of one thread, "
        f"load average {machine['load_average_start']:.1f} at the start, seconds",
        ("", "step", "computing", "waiting", "sending", "update"),
    )
    table.add_row("one process, measured", f"{measured.whole_seconds:.3f}", *[""] * 4)
    table.add_row(f"{setting.ranks} ranks, measured", f"{measured.together_seconds:.3f}", *[""] * 4)
    for one in measured.profiles:
        spent = (one.computing, one.waiting, one.sending, one.update)
        start, stop = measured.spans[one.rank]
        table.add_row(
            f"  rank {one.rank}, {stop - start:,} tokens", "", *(f"{seconds:.3f}" for seconds in spent)
        )
    timeline = measured.timeline
    table.add_row(f"{setting.ranks} ranks, replayed", f"{timeline.seconds:.3f}", *[""] * 4)
    for rank in range(len(timeline.of_rank)):
        table.add_row(f"  rank {rank}", "", f"{timeline.busy_seconds(rank):.3f}", *[""] * 3)
    by_heads = median(measured.heads_steps)
    table.add_row(f"{setting.ranks} ranks by heads, measured", f"{by_heads:.3f}", *[""] * 4)
    in_pairs = f"{setting.ranks} ranks, two sequences from both ends, measured, of each"
    table.add_row(in_pairs, f"{measured.pairs_seconds:.3f}", *[""] * 4)
    table.caption = (
        f"speed-up measured {measured.speedup:.2f}, replayed {measured.modelled_speedup:.2f}; "
        f"replay off by {measured.error:+.1%}; by heads {measured.heads_speedup:.2f}; "
        f"two ways at once {measured.pairs_speedup:.2f}"
    )
    table.caption_justify = "left"
    return table


def _operations(measured: Measured) -> Table:
    link = measured.link
    ranks = [operation_seconds(program) for program in measured.programs]
    table = _table(
        "what each rank computes when it runs alone, seconds",
        ("operation", *(f"rank {rank}" for rank in range(len(ranks)))),
    )
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        table.add_row(name, *(f"{rank[name]:.3f}" if name in rank else "" for rank in ranks))
    table.caption = (
        f"a message of n bytes: {1e3 * link.alpha:.2f} ms + n / {link.beta / 1e6:,.0f} MB/s; the sender's "
        f"call: {1e3 * link.sender_alpha:.2f} ms + n / {link.sender_beta / 1e6:,.0f} MB/s"
    )
    table.caption_justify = "left"
    return table


def _counts(measured: Measured) -> Table:
    table = _table(
        "sent, closed forms against the log of a step", ("rank", "layer", "phase", "messages", "bytes", "")
    )
    for one in measured.counts:
        logged = "as logged" if one.agrees else f"logged {one.recorded_messages}, {one.recorded_bytes:,}"
        table.add_row(str(one.rank), str(one.layer), one.phase, str(one.messages), f"{one.bytes:,}", logged)
    return table


def _modelled(rows: Sequence[Modelled]) -> Table:
    lengths = list(dict.fromkeys(row.tokens for row in rows))
    ranks = list(dict.fromkeys(row.ranks for row in rows))
    cells = [(tokens, count) for tokens in lengths for count in ranks]
    table = _table(
        f"modelled on {rows[0].device}, {rows[0].sequences} in a micro-batch: efficiency in per cent",
        ("method", *(f"{_short(tokens)} R={count}" for tokens, count in cells)),
    )
    found = {(row.label, row.tokens, row.ranks): row for row in rows}
    for label in dict.fromkeys(row.label for row in rows):
        table.add_row(label, *(_cell(found[label, *cell]) for cell in cells))
    return table


def _cell(row: Modelled) -> str:
    if row.efficiency is None:
        return "-"
    return f"{100 * row.efficiency:.0f}"


def _sensitivities(rows: Sequence[Sensitivity]) -> Table:
    """Of one device: a line a constant, a column for every headline."""
    columns = list(dict.fromkeys(row.headline for row in rows))
    table = _table(
        f"modelled on {rows[0].device}: efficiency in per cent with other constants",
        ("halved / doubled", *(headline.label for headline in columns)),
    )
    found = {(row.headline, row.constant, row.factor): row.efficiency for row in rows}
    for constant in dict.fromkeys(row.constant for row in rows):
        table.add_row(
            constant,
            *(
                " / ".join(f"{100 * found[column, constant, factor]:.1f}" for factor in (0.5, 2.0))
                for column in columns
            ),
        )
    return table


def _goals(goals: Iterator[Goal]) -> Table:
    table = _table("goals", ("goal", "wanted", "got", ""))
    for goal in goals:
        sign = ">=" if goal.at_least else "<="
        table.add_row(
            goal.name, f"{sign} {goal.wanted:g}", f"{goal.got:.3f}", "met" if goal.met else "not met"
        )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    return table


def _short(tokens: int) -> str:
    return f"{tokens // 2**20}M" if tokens >= 2**20 else f"{tokens // 1024}K"
