"""What the mixers of the delta rules with decay share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.initialise import linear_default_
from models.kinds.delta_rule import DeltaRuleConfig
from models.layers import delta_rule_chunk
from models.layers.chunk_recurrence import ChunkMaps
from models.layers.decay_controls import RMSNorm, unit
from models.layers.mixer import settings
from models.layers.recurrence import Operands, Recurrence


class DeltaRule(Recurrence):
    """Unit queries and keys, and how much of what a key held is replaced: one rate a head."""

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__(model, index)
        self.largest_rate = 2.0 if settings(model, index, DeltaRuleConfig).negative_eigenvalues else 1.0
        self.rate = nn.Linear(model.hidden_size, self.heads.number, bias=False)
        self.norm = RMSNorm(self.heads.value)

    def log_decay(self, rate: Tensor, *controls: Tensor) -> Tensor:
        """Of rates [B, T, H, 1] and controls [B, T, .] -> [B, T, H, K or 1], float32 at least."""
        raise NotImplementedError

    def operands(self, query: Tensor, key: Tensor, value: Tensor, *controls: Tensor) -> Operands:
        logits = controls[0].to(torch.promote_types(query.dtype, torch.float32))
        rate = self.largest_rate * torch.sigmoid(logits).unsqueeze(-1)
        log_decay = self.log_decay(rate, *controls[1:])
        return Operands(unit(query) * self.heads.key**-0.5, unit(key), value, log_decay, rate)

    def chunk_maps(self, operands: Operands) -> ChunkMaps:
        query, key, value, log_decay, rate, _ = operands
        assert rate is not None, "the delta rule has rates"
        return delta_rule_chunk.chunk_maps(query, key, value, log_decay, rate)

    def run_kernel(
        self, op: Callable[..., Any], operands: Operands, state: Tensor, *log_decay: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`op` of flash-linear-attention, with a decay in the shape it takes, if it takes one."""
        query, key, value, _, rate, _ = operands
        assert rate is not None, "the delta rule has rates"
        out, state = op(
            query.to(value.dtype),
            key.to(value.dtype),
            value,
            *log_decay,
            rate.squeeze(-1),
            scale=1.0,
            initial_state=state,
            output_final_state=True,
        )
        return out, state

    def initialise(self, generator: torch.Generator) -> None:
        super().initialise(generator)
        linear_default_(self.rate.weight, generator)
