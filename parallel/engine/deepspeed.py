"""The training engine: one path through deepspeed at every size, one CPU process included."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel.config import ParallelConfig
from parallel.engine.settings import deepspeed_settings, import_deepspeed
from parallel.engine.shards import ShardedState
from parallel.world import World


@dataclass(frozen=True)
class StepResult:
    """applied: whether the parameters changed; gradient_norm: before clipping, finite if applied."""

    applied: bool
    gradient_norm: float


@dataclass(frozen=True)
class OwnedTensors:
    """The elements of a parameter that this rank answers for, from `start` of the flattened whole on.

    dtype: of the forward.  shape: of the whole.  views: {"master", "exp_avg", "exp_avg_sq"}, flat float32
    views of what the optimizer updates, on the device; empty when the rank has no element.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    views: dict[str, Tensor]


class Engine:
    """AdamW over data x sequence ranks with ZeRO.

    groups: {"params": list of parameters, "lr": float, "weight_decay": float}, every parameter in one.
    gradient_clipping: largest norm, 0 for none. accumulation: calls of `backward` before each `step`.
    Every parameter must get a gradient on every rank in every micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        config: ParallelConfig,
        world: World,
        *,
        betas: tuple[float, float],
        eps: float,
        gradient_clipping: float,
        accumulation: int,
        device: torch.device,
    ) -> None:
        _check_groups(model, groups)
        deepspeed = import_deepspeed(config.zero_stage, config.timeout_seconds)
        model.to(device)
        self.settings = deepspeed_settings(
            config, world.size, sum(p.numel() for p in model.parameters()), gradient_clipping, accumulation
        )
        self._deepspeed = deepspeed
        self._config = config
        self._world = world
        self._accumulation = accumulation
        self._micro_batches = 0
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(groups, betas=betas, eps=eps),
            config=self.settings,
            dist_init_required=False,
        )
        self._state = ShardedState(self._engine, config.zero_stage)

    @property
    def module(self) -> Any:
        """The callable model; `.train()` and `.eval()` as on any module."""
        return self._engine

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradients. loss: 0-dim, already on the scale of the whole step.

        The step's gradient is the sum over ranks and micro-batches of d loss.
        """
        assert self._micro_batches < self._accumulation, (
            f"{self._accumulation} micro-batches make a step; call step() before the next backward"
        )
        self._micro_batches += 1
        self._engine.set_gradient_accumulation_boundary(self._micro_batches == self._accumulation)
        # deepspeed divides by the world; it would divide by the micro-batches too.
        self._engine.backward(loss * self._world.size, scale_wrt_gas=False)

    def step(self, learning_rates: list[float], weight_decays: list[float]) -> StepResult:
        """Clip and update, each group at its own rates. Collective.

        A gradient that is not finite on any rank is dropped on all, before anything has changed.
        """
        assert self._micro_batches == self._accumulation, (
            f"step() after {self._micro_batches} of {self._accumulation} micro-batches"
        )
        self._micro_batches = 0
        groups = self._engine.basic_optimizer.param_groups
        for group, rate, decay in zip(groups, learning_rates, weight_decays, strict=True):
            group["lr"], group["weight_decay"] = rate, decay
        if self._config.zero_stage == 0:
            return self._step_unsharded()
        self._engine.step()  # every ZeRO optimizer looks at the reduced norm first and drops it if not finite
        norm = float(self._engine.get_global_grad_norm())
        applied = bool(self._engine.was_step_applied())
        assert applied == math.isfinite(norm), (
            f"deepspeed: step applied={applied} at a gradient norm of {norm}"
        )
        return StepResult(applied, norm)

    def _step_unsharded(self) -> StepResult:
        """Stage 0 knows no norm and would apply anything; the reduced gradients are the same on all ranks."""
        squares = [
            p.grad.double().square().sum() for p in self._engine.module.parameters() if p.grad is not None
        ]
        norm = float(torch.stack(squares).sum().sqrt())
        if math.isfinite(norm):
            self._engine.step()
            return StepResult(True, norm)
        self._engine.zero_grad()
        return StepResult(False, norm)

    def gathered(self) -> AbstractContextManager[Any]:
        """Inside, every rank's model holds whole parameters, to be read only. Collective under ZeRO-3."""
        if self._config.zero_stage < 3:
            return nullcontext()
        context: AbstractContextManager[Any] = self._deepspeed.zero.GatheredParameters(
            list(self._engine.module.parameters()), modifier_rank=None
        )
        return context

    def named_tensors(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Per parameter {"parameter", "master", "exp_avg", "exp_avg_sq", "step"}, on the CPU. Collective.

        Whole tensors, the same bytes at every layout: "parameter" in the dtype of the forward, "step" 0-dim,
        the rest float32.
        """
        step = self._state.step()
        for name, parameter in self._engine.module.named_parameters():
            tensors = self._state.gather(parameter)
            weight = tensors["master"].to(parameter.dtype)
            yield name, {"parameter": weight, **tensors, "step": torch.tensor(step, dtype=torch.float32)}

    def owned_tensors(self) -> list[OwnedTensors]:
        """What `named_tensors` gives, split over the ranks without a message and without a copy."""
        owned = []
        for name, parameter in self._engine.module.named_parameters():
            start, views = self._state.owned(parameter, self._world.rank, self._world.size)
            shape = tuple(self._state.shape(parameter))
            owned.append(OwnedTensors(name, parameter.dtype, shape, start, views))
        return owned

    def adam_step(self) -> float:
        """Adam's step counter, one for all parameters."""
        return self._state.step()

    def load_named_tensors(self, getter: Callable[[str], Mapping[str, Tensor]]) -> None:
        """Restore what `named_tensors` gave, at any layout. Collective. `getter(name)` may lack "master"."""
        steps: set[float] = set()
        for name, parameter in self._engine.module.named_parameters():
            tensors = dict(getter(name))
            tensors.setdefault("master", tensors["parameter"])
            self._state.scatter(parameter, tensors)
            steps.add(float(tensors["step"]))
        if len(steps) != 1:
            raise ValueError(f"the parameters' optimizer steps differ: {sorted(steps)}; wanted one for all")
        self._state.set_step(steps.pop())
        self._state.refresh_weights()

    def describe(self) -> dict[str, str | int | float]:
        """What deepspeed chose, for the log."""
        zero = self.settings["zero_optimization"]
        return {
            "deepspeed": self._deepspeed.__version__,
            "optimizer": type(self._engine.basic_optimizer).__name__,
            "wrapper": type(self._engine.optimizer).__name__,
            "zero_stage": self._config.zero_stage,
            "weights": self._config.precision,
            "masters": "float32",
            "accumulation": "float32",
            "reduction": "float32",
            "gradient_clipping": self.settings["gradient_clipping"],
            "bucket_elements": zero["reduce_bucket_size"],
        }


def _check_groups(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Every parameter of the model in one non-empty group, none of them 0-dim: deepspeed fails on each."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen: set[int] = set()
    for index, group in enumerate(groups):
        if not group["params"]:
            raise ValueError(f"parameter group {index} is empty; leave it out")
        for parameter in group["params"]:
            if id(parameter) in seen or id(parameter) not in names:
                name = names.get(id(parameter), "a tensor that is no parameter of the model")
                raise ValueError(
                    f"parameter group {index}: {name} must be in exactly one group, and the model's"
                )
            seen.add(id(parameter))
    missing = [name for key, name in names.items() if key not in seen]
    if missing:
        raise ValueError(f"parameters in no group: {missing}; put each in one")
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ValueError(f"0-dim parameters {scalars}: deepspeed cannot shard them; give them shape [1]")
