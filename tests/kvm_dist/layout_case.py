"""Training steps of a hybrid model at any layout, from the same tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvm_dist.config import OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from kvm_dist.data.loader import MicroBatch
from kvm_dist.evaluate.validation import validate
from kvm_dist.sequence_split import SequenceSplit
from kvm_dist.step import TrainStep
from models.backbone import Backbone
from models.loss import token_losses
from models.parameter_groups import parameter_groups
from models.sequence_shards import sequence_shards
from parallel.config import ParallelConfig
from parallel.engine.deepspeed import Engine
from parallel.mesh import Mesh
from parallel.sequence.context import SequenceContext
from parallel.sequence.recorded import Message, RecordedExchange
from parallel.world import World
from tests.models.tiny import HYBRID, tiny_batch, tiny_model
from tests.support.gates import FileGates

STEPS = 2
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Layout:
    data: int = 1
    sequence: int = 1
    accumulation: int = 1
    zero_stage: int = 1
    activation_checkpointing: bool = False
    tokens: int = 128
    sequences: int = 12
    balanced: bool = True
    truncate_gradients: bool = False
    alternate: bool = False
    two_way: bool = False
    head_parallel: int = 1
    loss_chunk: int | None = None
    kv_heads: int | None = None
    vocab_size: int = 37
    layers: tuple[str, ...] = tuple(HYBRID)

    @property
    def ranks(self) -> int:
        return self.data * self.sequence


def run_layout(world: World, layout: Layout) -> dict[str, Any]:
    """Losses and gradient norms of two steps, the gradients of the first, this rank's logits before it.

    The labels of one sequence are masked: some micro-batches have far fewer valid tokens than others.
    """
    model, mesh, engine, split, config = _parts(world, layout)
    inputs, labels = tiny_batch(layout.tokens, layout.sequences)
    labels[layout.sequences // 2 - 1] = -100
    with torch.no_grad():
        logits = engine.module(split.inputs(inputs), split.context())
        split.drain()
    step = TrainStep(config, engine, parameter_groups(model), split)
    batch = _micro_batches(inputs, labels, layout, mesh.data_rank)
    held_out = validate(engine.module, batch, split, layout.loss_chunk)
    outcomes = [step(batch, 0, stop_requested=False)]
    gradients = {name: kinds["exp_avg"] / (1 - BETAS[0]) for name, kinds in engine.named_tensors()}
    outcomes += [step(batch, number, stop_requested=False) for number in range(1, STEPS)]
    return {
        "losses": [outcome.loss for outcome in outcomes],
        "norms": [outcome.gradient_norm for outcome in outcomes],
        "tokens": outcomes[0].tokens,
        "gradients": gradients,
        "logits": logits,
        "held out": held_out,
        "span": (split.start, split.stop),
    }


def run_and_go_on(world: World, layout: Layout, other: Layout) -> list[float]:
    """The losses of two steps, the second at another layout from what the first left."""
    losses: list[float] = []
    saved: dict[str, dict[str, Tensor]] = {}
    for number, one in enumerate((layout, other)):
        model, mesh, engine, split, config = _parts(world, one, filled=not saved)
        if saved:
            engine.load_named_tensors(saved.__getitem__)
        inputs, labels = tiny_batch(one.tokens, one.sequences)
        labels[one.sequences // 2 - 1] = -100
        step = TrainStep(config, engine, parameter_groups(model), split)
        batch = _micro_batches(inputs, labels, one, mesh.data_rank)
        losses.append(step(batch, number, stop_requested=False).loss)
        saved = dict(engine.named_tensors())
    return losses


def gated_step(world: World, layout: Layout, folder: Path) -> list[Message]:
    """A step of two micro-batches in which rank 0 does not end its first backward before the last rank has
    ended its second forward. What this rank logged of the second."""
    model, mesh, engine, split, config = _parts(world, layout)
    gates, forwards = FileGates(folder, timeout_seconds=15), [0]

    def end_of_forward(*_: Any) -> None:
        forwards[0] += 1
        if world.rank == world.size - 1 and forwards[0] == 2:
            gates.open("second forward")

    def end_of_backward(*_: Any) -> None:
        if world.rank == 0 and forwards[0] == 1:
            gates.wait("second forward")

    model.norm_head.register_forward_pre_hook(end_of_forward)
    model.norm_embedding.register_full_backward_pre_hook(end_of_backward)
    recorded = _record(split, mesh)
    inputs, labels = tiny_batch(layout.tokens, layout.sequences)
    step = TrainStep(config, engine, parameter_groups(model), split)
    step(_micro_batches(inputs, labels, layout, mesh.data_rank), 0, stop_requested=False)
    return recorded[1].messages


def first_forwards(world: World, layout: Layout, folder: Path, waiting: int) -> list[str]:
    """A step in which rank `waiting` begins no forward before the other rank has ended one."""
    model, mesh, engine, split, config = _parts(world, layout)
    gates, ended = FileGates(folder, timeout_seconds=8), list[str]()

    def begin(*_: Any) -> None:
        if world.rank == waiting and not ended:
            gates.wait("first forward")

    def end(*_: Any) -> None:
        ended.append("forward")
        if world.rank != waiting:
            gates.open("first forward")

    model.embedding.register_forward_pre_hook(begin)
    model.norm_head.register_forward_pre_hook(end)
    model.norm_embedding.register_full_backward_pre_hook(lambda *_: ended.append("backward"))
    inputs, labels = tiny_batch(layout.tokens, layout.sequences)
    step = TrainStep(config, engine, parameter_groups(model), split)
    step(_micro_batches(inputs, labels, layout, mesh.data_rank), 0, stop_requested=False)
    return ended


def _record(split: SequenceSplit, mesh: Mesh) -> list[RecordedExchange]:
    """Filled with the log of each micro-batch, whose ranks are numbered along its sequence."""
    recorded: list[RecordedExchange] = []
    context = split.context

    def logged(micro_batch: int | None = None) -> SequenceContext:
        made = context(micro_batch)
        place = split.spans.index(split.span(micro_batch or 0))
        recorded.append(RecordedExchange(made.exchange, place))
        made.exchange = recorded[-1]
        return made

    split.context = logged  # type: ignore[method-assign]
    return recorded


def kept_bytes(world: World, layout: Layout) -> tuple[list[int], list[int]]:
    """In copies of what was sent, as each micro-batch of a step ends, and each batch of a validation."""
    model, mesh, engine, split, config = _parts(world, layout)
    kept: list[int] = []
    release = split.release

    def counted() -> None:
        kept.append(split.bytes_kept)
        release()

    split.release = counted  # type: ignore[method-assign]
    inputs, labels = tiny_batch(layout.tokens, layout.sequences)
    batches = _micro_batches(inputs, labels, layout, mesh.data_rank)
    TrainStep(config, engine, parameter_groups(model), split)(batches, 0, stop_requested=False)
    of_step, kept[:] = kept[:], []
    validate(model, batches, split)
    assert split.bytes_kept == 0
    return of_step, kept


def both_ways(world: World, layout: Layout) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """This rank's logits and own gradients of the same sequences, laid over the ranks from either end."""
    found = []
    for micro_batch in (0, 1):
        model, _, _, split, _ = _parts(world, layout)
        inputs, labels = tiny_batch(layout.tokens, layout.sequences)
        logits = model(split.inputs(inputs, micro_batch), split.context(micro_batch))
        token_losses(logits, split.labels(labels, micro_batch))[0].backward()
        split.drain()
        gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        found.append((logits.detach(), gradients))
    return found


def mixed_up(world: World, layout: Layout) -> None:
    """Rank 0 is in micro-batch 0, rank 1 in micro-batch 2, which goes the same way."""
    model, _, _, split, _ = _parts(world, layout)
    inputs, _ = tiny_batch(layout.tokens, layout.sequences)
    with torch.no_grad():
        model(split.inputs(inputs), split.context(2 * world.rank))


def _parts(
    world: World, layout: Layout, *, filled: bool = True
) -> tuple[Backbone, Mesh, Engine, SequenceSplit, RunConfig]:
    """filled: otherwise the weights are NaN, as new memory may be."""
    parallel = ParallelConfig(
        data=layout.data,
        sequence=layout.sequence,
        head_parallel=layout.head_parallel,
        zero_stage=layout.zero_stage,
    )
    changes: dict[str, Any] = {
        "activation_checkpointing": layout.activation_checkpointing,
        "vocab_size": layout.vocab_size,
    }
    if layout.kv_heads is not None:
        budget = {"kind": "power_law", "factor": 3, "minimum": 16}
        changes |= {"num_heads": 4, "kvm": {"chunk": 16, "kv_heads": layout.kv_heads, "budget": budget}}
    model = tiny_model(list(layout.layers), **changes)
    if not filled:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
    config = RunConfig(
        model=model.config,
        parallel=parallel,
        train=TrainConfig(
            steps=8,
            batch_sequences=layout.sequences,
            accumulation=layout.accumulation,
            loss_chunk=layout.loss_chunk,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, eps=1e-2, gradient_clipping=0.0),
        schedule=ScheduleConfig(warmup_steps=0),
        run_root=Path("unused"),
    )
    mesh = Mesh.build(world, parallel)
    shards = sequence_shards(model.config, layout.tokens, layout.sequence, balanced=layout.balanced)
    split = SequenceSplit(
        mesh,
        shards,
        truncate_gradients=layout.truncate_gradients,
        head_parallel=layout.head_parallel,
        alternate=layout.alternate,
        in_two_ways=layout.two_way,
    )
    return model, mesh, _engine(config, model, world), split, config


def _engine(config: RunConfig, model: torch.nn.Module, world: World) -> Engine:
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [parameters[name] for name in group.names], "lr": 0.0, "weight_decay": 0.0}
        for group in parameter_groups(model)  # type: ignore[arg-type]
    ]
    return Engine(
        model,
        groups,
        config.parallel,
        world,
        betas=BETAS,
        eps=config.optimizer.eps,
        gradient_clipping=0.0,
        accumulation=config.train.accumulation,
        device=world.device,
    )


def _micro_batches(inputs: Tensor, labels: Tensor, layout: Layout, data_rank: int) -> list[MicroBatch]:
    parts = zip(
        inputs.chunk(layout.data * layout.accumulation),
        labels.chunk(layout.data * layout.accumulation),
        strict=True,
    )
    return [MicroBatch(*part) for part in list(parts)[data_rank :: layout.data]]
