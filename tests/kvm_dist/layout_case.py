"""Training steps of a hybrid model at any layout, from the same tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvm_dist.config import OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from kvm_dist.data.loader import MicroBatch
from kvm_dist.sequence_split import SequenceSplit
from kvm_dist.step import TrainStep
from models.parameter_groups import parameter_groups
from parallel.config import ParallelConfig
from parallel.engine.deepspeed import Engine
from parallel.mesh import Mesh
from parallel.world import World
from tests.models.tiny import HYBRID, tiny_batch, tiny_model

TOKENS, SEQUENCES, STEPS = 128, 12, 2
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Layout:
    data: int = 1
    sequence: int = 1
    accumulation: int = 1
    zero_stage: int = 1
    activation_checkpointing: bool = False

    @property
    def ranks(self) -> int:
        return self.data * self.sequence


def run_layout(world: World, layout: Layout) -> dict[str, Any]:
    """Losses and gradient norms of two steps, the gradients of the first, this rank's logits before it."""
    parallel = ParallelConfig(data=layout.data, sequence=layout.sequence, zero_stage=layout.zero_stage)
    model = tiny_model(HYBRID, activation_checkpointing=layout.activation_checkpointing)
    config = RunConfig(
        model=model.config,
        parallel=parallel,
        train=TrainConfig(steps=8, batch_sequences=SEQUENCES, accumulation=layout.accumulation),
        optimizer=OptimizerConfig(learning_rate=1e-3, eps=1e-2, gradient_clipping=0.0),
        schedule=ScheduleConfig(warmup_steps=0),
        run_root=Path("unused"),
    )
    mesh = Mesh.build(world, parallel)
    engine = _engine(config, model, world)
    split = SequenceSplit(mesh, TOKENS, model.config.position_multiple)
    inputs, labels = tiny_batch(TOKENS, SEQUENCES)
    labels[5] = -100  # uneven: some micro-batches have far fewer valid tokens
    with torch.no_grad():
        logits = engine.module(split.local(inputs), split.context())
        split.drain()
    step = TrainStep(config, engine, parameter_groups(model), split)
    batch = _micro_batches(inputs, labels, layout, mesh.data_rank)
    outcomes = [step(batch, 0, stop_requested=False)]
    gradients = {name: kinds["exp_avg"] / (1 - BETAS[0]) for name, kinds in engine.named_tensors()}
    outcomes += [step(batch, number, stop_requested=False) for number in range(1, STEPS)]
    return {
        "losses": [outcome.loss for outcome in outcomes],
        "norms": [outcome.gradient_norm for outcome in outcomes],
        "tokens": outcomes[0].tokens,
        "gradients": gradients,
        "logits": logits,
        "span": (split.start, split.stop),
    }


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
