"""Where deepspeed keeps a parameter's float32 master and its moments, at every ZeRO stage.

Its own getters know stages 1 to 3 only, need a first step, and turn -0.0 into +0.0; its setters fail when a
parameter does not divide by the world. Here every stage is a map from a parameter to a slice of a flat tensor
that the optimizer holds state for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel import collectives

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shard:
    """Elements [start, start + count) of a parameter lie in `flat` from `offset` on."""

    flat: Tensor
    offset: int
    start: int
    count: int

    def of(self, flat: Tensor) -> Tensor:
        """This shard's slice of a tensor laid out like `flat`."""
        return flat.detach().view(-1)[self.offset : self.offset + self.count]


class ShardedState:
    """Masters, moments and steps of the parameters of a deepspeed engine.

    Creates the moments (zeros, step 0) where the optimizer would at its first step.
    """

    def __init__(self, engine: Any, zero_stage: int) -> None:
        self._engine = engine
        self._zero_stage = zero_stage
        self._adam: torch.optim.Optimizer = engine.basic_optimizer
        for flat in self._flat_tensors():
            state = self._adam.state[flat]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                for moment in MOMENTS:
                    state[moment] = torch.zeros_like(flat, memory_format=torch.preserve_format)

    def owned(self, parameter: nn.Parameter, rank: int, ranks: int) -> tuple[int, dict[str, Tensor]]:
        """The first element that `rank` answers for, and flat views of its elements in the optimizer.

        Every element is of exactly one rank; where all ranks hold all of them, they are dealt out evenly.
        """
        shard = self._locate(parameter)
        if shard is None:
            return 0, {}
        if self._zero_stage == 0:
            start, end = (shard.count * edge // ranks for edge in (rank, rank + 1))
            shard = Shard(shard.flat, start, start, end - start)
        return shard.start, self._named([shard.of(tensor) for tensor in self._tensors(shard)])

    def gather(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """{"master", "exp_avg", "exp_avg_sq"}: whole float32 tensors on the CPU. Collective."""
        shard = self._locate(parameter)
        shape = self.shape(parameter)
        if self._zero_stage == 0:
            assert shard is not None, "stage 0 holds everything everywhere"
            pieces = [shard.of(tensor) for tensor in self._tensors(shard)]
            return self._named([piece.view(shape).cpu().clone() for piece in pieces])
        # Bits are summed, not numbers: each lies on one rank, all others add zero.
        bits = torch.zeros(1 + len(MOMENTS), shape.numel(), dtype=torch.int32, device=self._engine.device)
        if shard is not None:
            for row, tensor in zip(bits, self._tensors(shard), strict=True):
                row[shard.start : shard.start + shard.count] = shard.of(tensor).view(torch.int32)
        whole = collectives.sum(bits).cpu().view(torch.float32)
        return self._named([row.view(shape).clone() for row in whole])

    def scatter(self, parameter: nn.Parameter, tensors: dict[str, Tensor]) -> None:
        """Put this rank's part of the whole tensors in place."""
        shard = self._locate(parameter)
        if shard is None:
            return
        for name, target in self._named(self._tensors(shard)).items():
            source = tensors[name].detach().reshape(-1)[shard.start : shard.start + shard.count]
            shard.of(target).copy_(source)

    def step(self) -> float:
        """Adam's step counter, one for all parameters."""
        steps = {float(self._adam.state[flat]["step"]) for flat in self._flat_tensors()}
        assert len(steps) == 1, f"all groups step together, got {sorted(steps)}"
        return steps.pop()

    def set_step(self, step: float) -> None:
        for flat in self._flat_tensors():
            self._adam.state[flat]["step"].fill_(step)

    def refresh_weights(self) -> None:
        """Copy the masters into the weights that the forward uses. Collective."""
        optimizer = self._engine.optimizer
        if self._zero_stage in (1, 2):
            optimizer.update_lp_params()
        elif self._zero_stage == 3:
            optimizer._partition_all_parameters()
            for group in range(len(optimizer.fp32_partitioned_groups_flat)):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            if optimizer.persistent_parameters:
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def _flat_tensors(self) -> Iterator[Tensor]:
        optimizer = self._engine.optimizer
        if self._zero_stage == 3:
            yield from optimizer.fp32_partitioned_groups_flat
            return
        for group in self._adam.param_groups:
            yield from group["params"]

    def _locate(self, parameter: nn.Parameter) -> Shard | None:
        """None when no element of the parameter lives on this rank."""
        if self._zero_stage == 0:
            return Shard(parameter, 0, 0, parameter.numel())
        if self._zero_stage == 3:
            return self._locate_stage_3(parameter)
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        flat = self._adam.param_groups[mapping.param_group_index]["params"][0]
        here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Shard(flat, here.start, there.start, here.numel)

    def _locate_stage_3(self, parameter: Any) -> Shard | None:
        """Equal parts in rank order, the last ones padded or empty."""
        optimizer = self._engine.optimizer
        group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = optimizer._get_param_partition_rank(parameter) * length
        count = min(length, parameter.ds_numel - start)
        return (
            Shard(optimizer.fp32_partitioned_groups_flat[group], offset, start, count) if count > 0 else None
        )

    def shape(self, parameter: Any) -> torch.Size:
        """Of the whole parameter."""
        return torch.Size(parameter.ds_shape) if self._zero_stage == 3 else parameter.shape

    def _tensors(self, shard: Shard) -> list[Tensor]:
        state = self._adam.state[shard.flat]
        return [shard.flat, *(state[moment] for moment in MOMENTS)]

    @staticmethod
    def _named(tensors: list[Tensor]) -> dict[str, Tensor]:
        return dict(zip(("master", *MOMENTS), tensors, strict=True))
