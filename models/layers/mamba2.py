"""The Mamba-2 mixer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.initialise import linear_default_
from models.layers import linear_attention_chunk
from models.layers.chunk_recurrence import ChunkMaps
from models.layers.decay_controls import DecayRates, RMSNorm
from models.layers.recurrence import Operands, Recurrence

RATES = (1.0, 16.0)


class Mamba2(Recurrence):
    """Linear attention whose step sizes set decays and scale values. What is read, and the value itself
    through a skip, is gated by SiLU and then normed over the heads that share keys.

    Rates, steps and skips start as published, matrices as those of the attention kinds.
    """

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__(model, index, convolution_bias=True)
        width, heads = model.hidden_size, self.heads
        self.step = nn.Linear(width, heads.number, bias=False)
        self.gate = nn.Linear(width, heads.value_width, bias=False)
        self.decay = DecayRates(heads.number, heads.number, RATES)
        self.skip = nn.Parameter(torch.empty(heads.number))
        self.norm = RMSNorm(heads.value_width, heads.key_groups)

    def controls(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.step(x),)

    def operands(self, query: Tensor, key: Tensor, value: Tensor, *controls: Tensor) -> Operands:
        step = self.decay.step(controls[0]).unsqueeze(-1)  # [B, T, H, 1]
        skip = (value * self.skip.unsqueeze(-1),)
        return Operands(query, key, value * step, self.decay.log_decay(step), skip=skip)

    def chunk_maps(self, operands: Operands) -> ChunkMaps:
        query, key, value, log_decay, *_ = operands
        if self.heads.key_groups > 1:
            query, key = self._of_each_head(query), self._of_each_head(key)
        return linear_attention_chunk.chunk_maps(query, key, value, log_decay)

    def kernel(self, operands: Operands, state: Tensor) -> tuple[Tensor, Tensor]:
        from fla.ops.simple_gla import chunk_simple_gla

        query, key, value, log_decay, *_ = operands
        out, state = chunk_simple_gla(
            self._of_each_head(query),
            self._of_each_head(key),
            value.to(query.dtype),
            log_decay.squeeze(-1),
            scale=1.0,
            initial_state=state,
            output_final_state=True,
        )
        return out, state

    def normed(self, out: Tensor, *gate: Tensor) -> Tensor:
        return self.norm((out * F.silu(gate[0])).flatten(2))

    def _of_each_head(self, z: Tensor) -> Tensor:
        """[B, T, groups, K] -> [B, T, H, K]."""
        return z.repeat_interleave(self.heads.number // self.heads.key_groups, dim=2)

    def initialise(self, generator: torch.Generator) -> None:
        super().initialise(generator)
        linear_default_(self.step.weight, generator)
        nn.init.ones_(self.skip)
