"""Settings and cost of sliding-window attention. Imports no torch."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from models.kinds.attention import (
    AttentionConfig,
    projection_flops,
    projection_parameters,
    read_flops,
    saved_elements,
    saved_windows,
    shift_elements,
    window_elements,
)
from models.layer_config import Elements, MixerCost

if TYPE_CHECKING:
    from models.config import ModelConfig


class SlidingWindowConfig(AttentionConfig):
    """Causal attention over the last `window` tokens."""

    implementation: ClassVar[str] = "models.layers.sliding_window:SlidingWindow"
    rotates_whole_head: ClassVar[bool] = True

    window: int = Field(256, ge=2)

    @property
    def position_multiple(self) -> int:
        return self.window  # queries are read in blocks of one window

    def cost(self, model: "ModelConfig", context_tokens: int) -> MixerCost:
        before = window_elements(model, min(context_tokens, self.window - 1))
        kept = Elements(shift_elements(model) + before)
        reads = read_flops(model, min(context_tokens, self.window))
        return MixerCost(
            projection_parameters(model),
            projection_flops(model) + reads,
            boundary=kept,
            decode_state=kept,
            saved=saved_elements(model) + saved_windows(model, 2),
        )
