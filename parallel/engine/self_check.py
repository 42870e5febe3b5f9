"""One step of the engine beside the same step in plain torch, on the machine and ranks of a run.

Several releases of deepspeed have lost parts of gradients, or of their norms, without an error.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel import collectives
from parallel.config import ParallelConfig
from parallel.engine.deepspeed import Engine
from parallel.world import World

TOLERANCES = {"float32": 1e-3, "bfloat16": 2e-2}  # relative; what a lost part of a gradient exceeds by far
_BETAS, _EPS = (0.9, 0.95), 1e-2  # a large eps: Adam must not magnify the rounding of small gradients
_RATE, _DECAY, _ACCUMULATION, _ROWS, _WIDTH, _BUCKET = 1e-2, 0.1, 2, 3, 24, 1000


@dataclass(frozen=True)
class EngineCheck:
    """Errors relative to plain torch, the largest of all ranks: of the gradient's norm and of the update."""

    norm_error: float
    update_error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """False also where an error is not a number."""
        return max(self.norm_error, self.update_error) <= self.tolerance


def check_engine(config: ParallelConfig, world: World) -> EngineCheck:
    """One clipped step of two micro-batches a rank, with the stage and precision of `config`. Collective.

    In several buckets, whatever `config` says.
    """
    config = config.model_copy(update={"data": world.size, "sequence": 1, "bucket_elements": _BUCKET})
    model = _net(world.device)
    before = {name: value.clone() for name, value in _reference_net(config, world).named_parameters()}
    whole = _Step(config, world)
    engine = Engine(
        model,
        [{"params": list(model.parameters()), "lr": 0.0, "weight_decay": 0.0}],
        config,
        world,
        betas=_BETAS,
        eps=_EPS,
        gradient_clipping=whole.clipping,
        accumulation=_ACCUMULATION,
        device=world.device,
    )
    for batch in whole.batches[world.rank :: world.size]:
        engine.backward(_loss(engine.module, batch) / len(whole.batches))
    norm = engine.step([_RATE], [_DECAY]).gradient_norm
    apart, moved = 0.0, 0.0
    for name, tensors in engine.named_tensors():
        wanted, start = whole.masters[name].cpu(), before[name].detach().cpu()
        apart += float((tensors["master"] - wanted).double().square().sum())
        moved += float((wanted - start).double().square().sum())
    errors = torch.tensor([abs(norm / whole.norm - 1), (apart / moved) ** 0.5], device=world.device)
    # A rank whose error is no number must not be hidden by a maximum.
    norm_error, update_error = collectives.maximum(errors.nan_to_num(nan=torch.inf)).tolist()
    return EngineCheck(norm_error, update_error, TOLERANCES[config.precision])


class _Step:
    """The step in plain torch. norm: of the gradient, before it is clipped to half of that."""

    def __init__(self, config: ParallelConfig, world: World) -> None:
        generator = torch.Generator().manual_seed(1)
        count = world.size * _ACCUMULATION
        dtype: torch.dtype = getattr(torch, config.precision)
        inputs = [torch.randn(_ROWS, _WIDTH, generator=generator) for _ in range(count)]
        self.batches = [one.to(world.device, dtype) for one in inputs]
        masters, model = _reference_net(config, world), _net(world.device).to(dtype)
        gradients = [torch.zeros_like(master) for master in masters.parameters()]
        for batch in self.batches:
            model.zero_grad()
            (_loss(model, batch) / count).backward()
            for total, parameter in zip(gradients, model.parameters(), strict=True):
                assert parameter.grad is not None, "every parameter is used"
                total += parameter.grad.float()
        self.norm = float(torch.stack([one.double().square().sum() for one in gradients]).sum().sqrt())
        self.clipping = self.norm / 2
        optimizer = torch.optim.AdamW(
            masters.parameters(), lr=_RATE, betas=_BETAS, eps=_EPS, weight_decay=_DECAY
        )
        for master, gradient in zip(masters.parameters(), gradients, strict=True):
            master.grad = gradient / 2
        optimizer.step()
        self.masters = {name: value.detach() for name, value in masters.named_parameters()}


class _Net(nn.Module):
    """A weight used twice and one that is tied, as gradients of such were lost."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.outer = nn.Linear(2 * _WIDTH, _WIDTH, bias=False)
        self.tied = nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(x)
        for _ in range(2):
            x = x + self.outer(torch.tanh(self.inner(x)))
        return x @ self.tied.weight


def _net(device: torch.device) -> _Net:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    net = _Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / _WIDTH**0.5)
    return net.to(device)


def _reference_net(config: ParallelConfig, world: World) -> _Net:
    """Masters: float32 of what the weights are rounded to."""
    return _net(world.device).to(getattr(torch, config.precision)).float()


def _loss(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).float().square().sum()
    return loss
