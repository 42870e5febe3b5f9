"""What one process of `bench scaling` does: five tasks, through the engine and the train step of a run."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kvm_dist.bench.scaling.clock import ClockedExchange, TurnExchange, Wires
from kvm_dist.bench.scaling.setting import Setting, Task
from kvm_dist.config import RunConfig
from kvm_dist.data.loader import MicroBatch
from kvm_dist.run_parts import build_engine, choose_algorithms, sequence_split
from kvm_dist.sequence_split import SequenceSplit
from kvm_dist.step import TrainStep
from models.backbone import Backbone
from models.loss import token_losses
from models.sequence_shards import sequence_shards
from parallel import collectives
from parallel.engine.deepspeed import Engine
from parallel.mesh import Mesh
from parallel.sequence.context import SequenceContext
from parallel.sequence.exchange import RankExchange
from parallel.sequence.ranks import RankedSequence
from parallel.world import World, join_world, leave_world

LINK_BYTES = (64, 65_536, 1_048_576, 8_388_608)
LINK_REPEATS = 15

Report = Callable[[], None]


def whole(setting: Setting, world: World, report: Report) -> dict[str, Any]:
    """One rank trains the whole sequence."""
    return _timed(setting, setting.task_config("whole"), world, report)


def heads(setting: Setting, world: World, report: Report) -> dict[str, Any]:
    """One node of sequence ranks trains it, split by heads."""
    return _timed(setting, setting.task_config("heads"), world, report)


def pairs(setting: Setting, world: World, report: Report) -> dict[str, Any]:
    """Sequence ranks train two, which begin on either end at the same time."""
    return _timed(setting, setting.task_config("pairs"), world, report)


def _timed(setting: Setting, config: RunConfig, world: World, report: Report) -> dict[str, Any]:
    """seconds: of each step after the first."""
    _, groups, engine = build_engine(config, world)
    split = sequence_split(config, Mesh.build(world, config.parallel))
    step = TrainStep(config, engine, groups, split)
    batch = [_batch(setting, number) for number in range(config.train.accumulation)]
    seconds = []
    for number in range(setting.steps + 1):
        seconds.append(step(batch, number, False).seconds)
        report()
    return {"seconds": seconds[1:]}


def together(setting: Setting, world: World, report: Report) -> dict[str, Any]:
    """Sequence ranks train it. events: the messages of each step after the first, as this rank saw them."""
    config = setting.task_config("together")
    _, groups, engine = build_engine(config, world)
    split = _ClockedSplit(sequence_split(config, Mesh.build(world, config.parallel)))
    link = _link(split.inner, world)
    step, batch = TrainStep(config, engine, groups, split), [_batch(setting)]  # type: ignore[arg-type]
    steps: list[dict[str, Any]] = []
    for number in range(setting.steps + 1):
        begun = time.perf_counter()
        seconds = step(batch, number, False).seconds
        events = [one.to_dict() for one in split.clocked.events()]
        steps.append({"begun": begun, "seconds": seconds, "events": events})
        report()
    return {"steps": steps[1:], "link": link}


def alone(setting: Setting, world: World, report: Report) -> dict[str, Any]:
    """Every sequence rank by itself, one after another: forwards in order, then backwards.

    As many processes do the same at once, as data ranks, so that the machine is as busy as in a real step
    and the update costs what it costs there.
    """
    config = setting.task_config("alone")
    model, groups, engine = build_engine(config, world)
    spans = sequence_shards(
        config.model, setting.tokens, setting.ranks, balanced=setting.shards == "balanced"
    ).spans
    turns = _Turns(config, model, engine, spans)
    rates = [(config.optimizer.learning_rate * g.learning_rate_scale, 0.0) for g in groups]
    rounds: list[dict[str, Any]] = []
    for _ in range(setting.steps + 1):
        rounds.append(turns.run(_batch(setting), rates))
        report()
    return {"rounds": rounds[1:], "spans": spans, "parameters": sum(p.numel() for p in model.parameters())}


class _Turns:
    """Logical sequence ranks of one process, each a micro-batch of one step."""

    def __init__(
        self, config: RunConfig, model: Backbone, engine: Engine, spans: tuple[tuple[int, int], ...]
    ) -> None:
        self.config, self.engine, self.spans = config, engine, spans
        self._gradient_times: list[float] = []
        # The embedding's gradient comes last: what the engine does after it is no longer the backward.
        model.embedding.weight.register_hook(lambda _: self._gradient_times.append(time.perf_counter()))

    def run(self, batch: MicroBatch, rates: list[tuple[float, float]]) -> dict[str, Any]:
        """ranks: per rank when forward and backward began and ended, and its messages; tail_seconds: what
        follows the last backward."""
        wires: Wires = {}
        self._gradient_times.clear()
        clocks = [
            ClockedExchange(TurnExchange(wires, rank, len(self.spans)), rank)
            for rank in range(len(self.spans))
        ]
        losses: list[Tensor] = []
        times: list[list[float]] = []
        for rank, clock in enumerate(clocks):
            begun = time.perf_counter()
            losses.append(self._forward(batch, rank, clock))
            times.append([begun, time.perf_counter()])
        for rank in reversed(range(len(self.spans))):
            times[rank].append(time.perf_counter())
            self.engine.backward(losses[rank])
            losses[rank] = losses[rank].detach()
            times[rank].append(self._gradient_times[-1])
        tail = self._tail(torch.stack(losses), rates)
        ranks = [
            {
                "forward": own[:2],
                "backward": own[2:],
                "events": [one.to_dict() for one in clock.events()],
            }
            for own, clock in zip(times, clocks, strict=True)
        ]
        return {"ranks": ranks, "tail_seconds": tail}

    def _forward(self, batch: MicroBatch, rank: int, clock: ClockedExchange) -> Tensor:
        start, stop = self.spans[rank]
        context = ranked_context(len(self.spans), rank, start, clock)
        logits = self.engine.module(batch.inputs[:, start:stop], context)
        loss_sum, _ = token_losses(logits, batch.labels[:, start:stop])
        return loss_sum / self.config.data.sequence_length

    def _tail(self, losses: Tensor, rates: list[tuple[float, float]]) -> float:
        """Reduction, the two sums that a step makes, and the update."""
        collectives.sum(losses)
        collectives.sum(losses)
        self.engine.step([rate for rate, _ in rates], [decay for _, decay in rates])
        return time.perf_counter() - self._gradient_times[-1]


def ranked_context(ranks: int, rank: int, start: int, exchange: ClockedExchange) -> RankedSequence:
    """The context of a logical rank, which has no groups."""
    alone = World(rank, ranks, rank, ranks, 0, torch.device("cpu"), "gloo")
    return RankedSequence(Mesh(alone, 0, 1, rank, ranks, 0.0), start, exchange)


class _ClockedSplit:
    """A `SequenceSplit` whose contexts talk through a clocked exchange."""

    def __init__(self, inner: SequenceSplit) -> None:
        self.inner = inner
        self.device = inner.device
        self.inputs, self.labels = inner.inputs, inner.labels
        self.rounds, self.release, self.drain = inner.rounds, inner.release, inner.drain

    def context(self, micro_batch: int | None = None) -> SequenceContext:
        context = self.inner.context(micro_batch)
        place = self.inner.spans.index(self.inner.span(micro_batch or 0))
        self.clocked = ClockedExchange(context.exchange, place)
        context.exchange = self.clocked
        return context


def _link(split: SequenceSplit, world: World) -> list[dict[str, float]]:
    """Between ranks 0 and 1, nobody computing. one_way: from the call of send until the tensor is there."""
    exchange = split.context().exchange
    assert isinstance(exchange, RankExchange), "more than one rank exchanges messages"
    found = []
    for size in LINK_BYTES:
        payload = (torch.zeros(size, dtype=torch.uint8),)
        rounds = [_round_trip(exchange, payload, world.rank) for _ in range(LINK_REPEATS)]
        split.drain()
        collectives.barrier()
        there, sending = (median(column) for column in zip(*rounds, strict=True))
        found.append({"bytes": size, "one_way_seconds": there / 2, "sender_seconds": sending})
    return found


def _round_trip(exchange: RankExchange, payload: tuple[Tensor, ...], rank: int) -> tuple[float, float]:
    """Seconds there and back, and of the call that sends; 0 on ranks that take no part."""
    collectives.barrier()
    start = time.perf_counter()
    if rank == 0:
        exchange.send_next("bench", payload)
        sent = time.perf_counter()
        exchange.receive_next("bench", payload)
        return time.perf_counter() - start, sent - start
    if rank == 1:
        exchange.send_previous("bench", exchange.receive_previous("bench", payload))
    return 0.0, 0.0


def _batch(setting: Setting, number: int = 0) -> MicroBatch:
    generator = torch.Generator().manual_seed(setting.seed + number)
    tokens = torch.randint(setting.vocab_size, (1, setting.tokens + 1), generator=generator)
    return MicroBatch(tokens[:, :-1], tokens[:, 1:])


TASKS: dict[Task, Callable[[Setting, World, Report], dict[str, Any]]] = {
    "whole": whole,
    "alone": alone,
    "together": together,
    "heads": heads,
    "pairs": pairs,
}


def run_task(task: Task, setting: Setting, folder: Path) -> None:
    """As a rank of the task's world. Leaves folder/rank-N.json; rank 0 adds a line to folder/progress after
    every piece of work."""
    config = setting.task_config(task)
    choose_algorithms(config)
    world = join_world(config.parallel, "cpu")

    def report() -> None:
        if world.rank == 0:
            with (folder / "progress").open("a", encoding="utf-8") as lines:
                lines.write(f"{task}\n")

    try:
        found = TASKS[task](setting, world, report)
        (folder / f"rank-{world.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    finally:
        leave_world()
