"""Settings and cost of full attention. Imports no torch."""

from typing import TYPE_CHECKING, ClassVar

from models.kinds.attention import (
    AttentionConfig,
    projection_flops,
    projection_parameters,
    read_flops,
    saved_elements,
    shift_elements,
    window_elements,
)
from models.layer_config import Elements, MixerCost

if TYPE_CHECKING:
    from models.config import ModelConfig


class FullAttentionConfig(AttentionConfig):
    """Causal attention over all tokens."""

    implementation: ClassVar[str] = "models.layers.full_attention:FullAttention"
    reads_by_heads: ClassVar[bool] = True

    def cost(self, model: "ModelConfig", context_tokens: int) -> MixerCost:
        kept = Elements(shift_elements(model) + window_elements(model, context_tokens))
        flops = projection_flops(model) + read_flops(model, context_tokens)
        return MixerCost(
            projection_parameters(model),
            flops,
            boundary=Elements(),
            decode_state=kept,
            saved=saved_elements(model),
        )
