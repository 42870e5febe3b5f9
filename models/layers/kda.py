"""The mixer of Kimi Delta Attention."""

import torch
from torch import Tensor

from models.config import ModelConfig
from models.layers.decay_controls import ControlMap, DecayRates
from models.layers.delta_rule import DeltaRule
from models.layers.recurrence import Operands

RATES = (1.0, 16.0)


class KDA(DeltaRule):
    """The delta rule with a decay per channel; reads are normed per head and gated by a sigmoid.

    Decays and the gate's bias start as published, matrices as those of the attention kinds.
    """

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__(model, index)
        width, heads = model.hidden_size, self.heads
        self.step = ControlMap(width, heads.key_width, heads.value)
        self.gate = ControlMap(width, heads.value_width, heads.value, bias=True)
        self.decay = DecayRates(heads.number, heads.key_width, RATES)

    def controls(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.rate(x), self.step(x)

    def log_decay(self, rate: Tensor, *controls: Tensor) -> Tensor:
        (step,) = controls
        return self.decay.log_decay(self.decay.step(step).unflatten(-1, (-1, self.heads.key)))

    def kernel(self, operands: Operands, state: Tensor) -> tuple[Tensor, Tensor]:
        from fla.ops.kda import chunk_kda

        return self.run_kernel(chunk_kda, operands, state, operands.log_decay)

    def normed(self, out: Tensor, *gate: Tensor) -> Tensor:
        return self.norm(out) * torch.sigmoid(gate[0])
