"""The mixer of gated linear attention."""

import torch.nn.functional as F
from torch import Tensor, nn

from models.config import GLAConfig, ModelConfig
from models.layers import linear_attention_chunk
from models.layers.chunk_recurrence import ChunkMaps
from models.layers.decay_controls import ControlMap, RMSNorm, softplus, wide
from models.layers.mixer import settings
from models.layers.recurrence import Operands, Recurrence


class GLA(Recurrence):
    """Linear attention with a decay per channel; reads are normed per head and gated by SiLU.

    Matrices start as those of the attention kinds.
    """

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__(model, index)
        config, heads = settings(model, index, GLAConfig), self.heads
        self.decay_divisor = config.decay_divisor
        self.decay = ControlMap(model.hidden_size, heads.key_width, config.decay_rank, bias=True)
        self.gate = nn.Linear(model.hidden_size, heads.value_width, bias=False)
        self.norm = RMSNorm(heads.value)

    def controls(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.decay(x),)

    def operands(self, query: Tensor, key: Tensor, value: Tensor, *controls: Tensor) -> Operands:
        kept = wide(controls[0]).unflatten(-1, (-1, self.heads.key))
        log_decay = -softplus(-kept) / self.decay_divisor  # log sigmoid
        return Operands(query * self.heads.key**-0.5, key, value, log_decay)

    def chunk_maps(self, operands: Operands) -> ChunkMaps:
        query, key, value, log_decay, *_ = operands
        return linear_attention_chunk.chunk_maps(query, key, value, log_decay)

    def kernel(self, operands: Operands, state: Tensor) -> tuple[Tensor, Tensor]:
        from fla.ops.gla import chunk_gla

        query, key, value, log_decay, *_ = operands
        out, state = chunk_gla(
            query, key, value, log_decay, scale=1.0, initial_state=state, output_final_state=True
        )
        return out, state

    def normed(self, out: Tensor, *gate: Tensor) -> Tensor:
        return self.norm(out) * F.silu(gate[0])
