"""A plan on the terminal, or as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby

from rich.table import Table

from kvm_dist.config import RunConfig
from kvm_dist.plan import LayerPlan, Plan, make_plan
from kvm_dist.plan_memory import MemoryPlan
from kvm_dist.progress import duration
from launch.console import table_console

SHOWN_SHARDS = 8  # at either end


def print_plan(config: RunConfig, tokens_per_second: float | None, as_json: bool) -> None:
    plan = make_plan(config, tokens_per_second)
    if as_json:
        print(json.dumps(asdict(plan) | {"memory": _with_total(plan.memory)}, indent=2))
        return
    console = table_console()
    console.print(_table(f"{plan.name}: the run", dict(_run(plan, config))))
    console.print(_layer_table(plan, config))
    if len(plan.shards) > 1:
        console.print(_shard_table(plan))
    console.print(_table("memory of the fullest rank, estimated", dict(_memory(plan))))


def _table(title: str, rows: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _run(plan: Plan, config: RunConfig) -> Iterator[tuple[str, str]]:
    parallel = config.parallel
    kinds = ", ".join(f"{kind} {_count(number)}" for kind, number in plan.parameters_by_kind.items())
    yield "parameters", f"{_count(plan.parameters)} ({plan.parameters:,})"
    yield (
        "of which",
        f"{kinds}, embedding {_count(plan.embedding_parameters)}, head {_count(plan.head_parameters)}",
    )
    yield (
        "ranks",
        f"{plan.ranks}: {parallel.data} data x {parallel.sequence} sequence, ZeRO-{parallel.zero_stage}",
    )
    yield (
        "micro-batch of a rank",
        f"{plan.sequences_per_micro_batch} sequences, {plan.tokens_per_rank:,} tokens at most",
    )
    if plan.padded_tokens:
        yield (
            "pads",
            f"{plan.padded_tokens} at the end of every sequence, to whole blocks; nothing counts them",
        )
    yield "tokens of a step", f"{plan.tokens_per_step:,}"
    yield "steps", f"{plan.steps:,}"
    yield "tokens", f"{_count(plan.tokens)} ({plan.tokens / plan.parameters:,.1f} per parameter)"
    yield (
        "FLOPs per token",
        f"training {_count(plan.train_flops_per_token)}, decoding {_count(plan.decode_flops_per_token)}",
    )
    yield "FLOPs of the run", _count(plan.train_flops)
    yield "checkpoint", f"{_bytes(plan.checkpoint_bytes)}; {_bytes(plan.checkpoints_kept_bytes)} kept"
    if plan.eta_seconds is None:
        yield "duration", "give --tokens-per-second"
    else:
        yield "duration", duration(plan.eta_seconds)


def _layer_table(plan: Plan, config: RunConfig) -> Table:
    """Equal neighbours share a row."""
    table = Table(title="layers", title_justify="left")
    edges = config.parallel.sequence - 1
    for title in ("layers", "kind", "parameters each", "training FLOPs/token", "state at the end"):
        table.add_column(title, justify="left" if title == "kind" else "right")
    if edges:
        table.add_column("sent over each shard edge", justify="right")
        table.add_column("gradients back", justify="right")
    for rows in _grouped(plan.layers, len(config.model.layers)):
        first = rows[0]
        sent = [_sent(first.boundary_bytes), _sent(first.returned_bytes)] if edges else []
        if any(first.swapped_bytes):
            sent[0] += f" + {_sent(first.swapped_bytes)} swapped"
        table.add_row(
            _places([row.index for row in rows]),
            first.kind,
            _count(first.parameters),
            _count(first.train_flops_per_token),
            _bytes(first.state_bytes),
            *sent,
        )
    return table


def _grouped(layers: tuple[LayerPlan, ...], pattern: int) -> list[list[LayerPlan]]:
    def cost(layer: LayerPlan) -> tuple[object, ...]:
        return (layer.kind, layer.parameters, layer.boundary_bytes)

    order = {cost(layer): layer.index for layer in reversed(layers)}
    ordered = sorted(layers, key=lambda layer: (order[cost(layer)], layer.index))
    return [list(rows) for _, rows in groupby(ordered, key=cost)]


def _places(indices: list[int]) -> str:
    if len(indices) <= 4:
        return ", ".join(map(str, indices))
    return f"{indices[0]}, {indices[1]}, ..., {indices[-1]}"


def _range(values: list[str]) -> str:
    return values[0] if len(set(values)) == 1 else f"{values[0]} ... {values[-1]}"


def _sent(sizes: Sequence[int]) -> str:
    """From the least to the most: more passes between nodes than inside them, wherever their edges lie."""
    return _range([_bytes(size) for size in sorted(sizes)])


def _shard_table(plan: Plan) -> Table:
    """Of many ranks the first and the last."""
    title = f"shards of a sequence: the dearest rank costs {100 * plan.imbalance:.2g} % more than the mean"
    table = Table(title=title, title_justify="left")
    for name in ("sequence rank", "tokens", "modelled cost", "activations", "states", "memory"):
        table.add_column(name, justify="right")
    for rank, shard in enumerate(plan.shards):
        if SHOWN_SHARDS <= rank < len(plan.shards) - SHOWN_SHARDS:
            if rank == SHOWN_SHARDS:
                table.add_row("...")
            continue
        table.add_row(
            str(rank),
            f"{shard.tokens:,}",
            f"{100 * shard.cost:.2f} %",
            _bytes(shard.memory.activations),
            _bytes(shard.memory.states),
            _bytes(shard.memory.total),
        )
    return table


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    memory = plan.memory
    yield "weights", _bytes(memory.weights)
    yield "float32 masters and Adam's moments", _bytes(memory.masters_and_moments)
    yield "gradients", _bytes(memory.gradients)
    yield "activations kept for the backward", _bytes(memory.activations)
    yield "gradients of logits, or a layer computed again", _bytes(memory.working)
    yield "states of the layers, received and sent", _bytes(memory.states)
    yield "together", _bytes(memory.total)


def _with_total(memory: MemoryPlan) -> dict[str, int]:
    return asdict(memory) | {"total": memory.total}


def _count(number: float) -> str:
    """12.3 M, 4.56 T."""
    for limit, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if number >= limit:
            return f"{number / limit:.4g} {unit}"
    return f"{number:.4g}"


def _bytes(number: float) -> str:
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= limit:
            return f"{number / limit:.4g} {unit}"
    return f"{number:.0f} B"
