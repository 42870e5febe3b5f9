"""Small training runs through the engine, and the same in plain torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from parallel.config import ParallelConfig
from parallel.engine.deepspeed import Engine, StepResult
from parallel.world import World

BETAS, EPS = (0.9, 0.95), 1e-2  # a large eps: Adam must not magnify the rounding of small gradients
Saved = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """data: ranks whose micro-batches make a step, whatever the world that runs them."""

    stage: int
    precision: str = "float32"
    clipping: float = 0.0
    accumulation: int = 1
    data: int = 2

    def with_world(self, stage: int, world: int) -> "Case":
        """The same global batch on other ranks: fewer ranks take more micro-batches each."""
        return replace(self, stage=stage, data=world, accumulation=self.data * self.accumulation // world)


class Net(nn.Module):
    """Odd sizes that no world divides, a weight used twice, one that is larger than all others together."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(11, 5) * 0.5)
        self.inner = nn.Linear(5, 7)
        self.outer = nn.Linear(7, 5, bias=False)
        self.scale = nn.Parameter(torch.rand(1))
        self.wide = nn.Parameter(torch.randn(37, 5) * 0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens]
        for _ in range(2):
            x = x + self.outer(torch.tanh(self.inner(x))) * self.scale
        return (x @ self.wide.t()).tanh() @ self.wide @ self.embedding.t()


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def groups(model: Net) -> list[dict[str, Any]]:
    """Two groups with rates of their own; the second has an odd number of elements."""
    decayed = [model.embedding, model.inner.weight, model.wide]
    rest = [model.inner.bias, model.outer.weight, model.scale]
    return [
        {"params": decayed, "lr": 0.0, "weight_decay": 0.0},
        {"params": rest, "lr": 0.0, "weight_decay": 0.0},
    ]


def rates(step: int) -> tuple[list[float], list[float]]:
    return [1e-2 / (step + 1), 3e-3], [0.1, 0.0]


def micro_batches(step: int, count: int) -> list[Tensor]:
    """Uneven: token counts differ."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 11, (2 + 3 * index,), generator=generator) for index in range(count)]


def loss_sum(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), tokens.roll(-1), reduction="sum")


def make_engine(world: World, case: Case) -> Engine:
    config = ParallelConfig(
        data=world.size, zero_stage=case.stage, precision=case.precision, timeout_seconds=30
    )
    model = net()
    return Engine(
        model,
        groups(model),
        config,
        world,
        betas=BETAS,
        eps=EPS,
        gradient_clipping=case.clipping,
        accumulation=case.accumulation,
        device=world.device,
    )


def engine_step(engine: Engine, world: World, case: Case, step: int, poison: bool = False) -> StepResult:
    """poison: the last rank's last loss is NaN."""
    batches = micro_batches(step, world.size * case.accumulation)
    tokens = sum(len(batch) for batch in batches)
    mine = batches[world.rank :: world.size]
    for index, batch in enumerate(mine):
        loss = loss_sum(engine.module(batch), batch) / tokens
        if poison and world.rank == world.size - 1 and index == len(mine) - 1:
            loss = loss * torch.nan
        engine.backward(loss)
    return engine.step(*rates(step))


def saved(engine: Engine) -> Saved:
    return dict(engine.named_tensors())


def trained(world: World, case: Case, steps: int) -> tuple[Saved, list[float]]:
    """(named tensors, gradient norms) after `steps` steps."""
    engine = make_engine(world, case)
    norms = [engine_step(engine, world, case, step).gradient_norm for step in range(steps)]
    return saved(engine), norms


def loaded_and_stepped(world: World, case: Case, start: Saved, step: int) -> tuple[Saved, Saved, float]:
    """(named tensors after loading `start`, after one step more, that step's gradient norm)"""
    engine = make_engine(world, case)
    engine.load_named_tensors(start.__getitem__)
    loaded = saved(engine)
    norm = engine_step(engine, world, case, step).gradient_norm
    return loaded, saved(engine), norm


def reference(case: Case, steps: int) -> tuple[Mapping[str, Mapping[str, Tensor]], list[float]]:
    """The same steps in plain torch: weights in the case's precision, gradients and masters in float32."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[case.precision]
    model = net().to(dtype)
    masters = net().to(dtype).float()
    optimizer = torch.optim.AdamW(groups(masters), betas=BETAS, eps=EPS)
    norms: list[float] = []
    for step in range(steps):
        gradients = _gradients(model, micro_batches(step, case.data * case.accumulation))
        for master, gradient in zip(masters.parameters(), gradients, strict=True):
            master.grad = gradient
        largest = case.clipping or float("inf")
        norms.append(float(nn.utils.clip_grad_norm_(masters.parameters(), largest)))
        for group, rate, decay in zip(optimizer.param_groups, *rates(step), strict=True):
            group["lr"], group["weight_decay"] = rate, decay
        optimizer.step()
        model.load_state_dict(masters.state_dict())
    state = {
        name: {"master": master.detach(), **optimizer.state[master]}
        for name, master in masters.named_parameters()
    }
    return state, norms


def _gradients(model: Net, batches: list[Tensor]) -> list[Tensor]:
    tokens = sum(len(batch) for batch in batches)
    total = [torch.zeros(parameter.shape) for parameter in model.parameters()]
    for batch in batches:
        model.zero_grad()
        (loss_sum(model(batch), batch) / tokens).backward()
        for gradient, parameter in zip(total, model.parameters(), strict=True):
            assert parameter.grad is not None
            gradient += parameter.grad.float()
    return total
