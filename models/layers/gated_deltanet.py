"""The Gated DeltaNet mixer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.initialise import linear_default_
from models.layers.decay_controls import DecayRates
from models.layers.delta_rule import DeltaRule
from models.layers.recurrence import Operands

RATES = (0.0, 16.0)


class GatedDeltaNet(DeltaRule):
    """The delta rule with one decay a head; reads are normed per head and gated by SiLU.

    Decays start as published, matrices as those of the attention kinds.
    """

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__(model, index)
        width, heads = model.hidden_size, self.heads
        self.step = nn.Linear(width, heads.number, bias=False)
        self.gate = nn.Linear(width, heads.value_width, bias=False)
        self.decay = DecayRates(heads.number, heads.number, RATES)

    def controls(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.rate(x), self.step(x)

    def log_decay(self, rate: Tensor, *controls: Tensor) -> Tensor:
        (step,) = controls
        return self.decay.log_decay(self.decay.step(step).unsqueeze(-1))

    def kernel(self, operands: Operands, state: Tensor) -> tuple[Tensor, Tensor]:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return self.run_kernel(chunk_gated_delta_rule, operands, state, operands.log_decay.squeeze(-1))

    def normed(self, out: Tensor, *gate: Tensor) -> Tensor:
        return self.norm(out) * F.silu(gate[0])

    def initialise(self, generator: torch.Generator) -> None:
        super().initialise(generator)
        linear_default_(self.step.weight, generator)
