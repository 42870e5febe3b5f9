"""Settings and cost of block-sliding-window attention. Imports no torch."""

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


class BlockWindowConfig(AttentionConfig):
    """Causal attention over the current block, the blocks before it and the first tokens of the sequence."""

    implementation: ClassVar[str] = "models.layers.block_window:BlockWindow"

    chunk: int = Field(256, ge=1, description="tokens of a block")
    window_chunks: int = Field(3, ge=1, description="blocks of the window, the current one included")
    sinks: int = Field(0, ge=0, description="first tokens of the sequence that are always read")

    @property
    def position_multiple(self) -> int:
        return self.chunk

    def problems(self, model: "ModelConfig", kind: str) -> list[str]:
        problems = super().problems(model, kind)
        if self.sinks > self.chunk:
            problems.append(f"model.{kind}.sinks={self.sinks} must be at most chunk={self.chunk}; lower it")
        return problems

    def cost(self, model: "ModelConfig", context_tokens: int) -> MixerCost:
        window = self.window_chunks * self.chunk
        halo, sinks = window - self.chunk, min(self.sinks, context_tokens)
        shift = shift_elements(model)
        reads = read_flops(model, min(context_tokens, window) + sinks)
        return MixerCost(
            projection_parameters(model),
            projection_flops(model) + reads,
            boundary=Elements(shift + window_elements(model, min(halo, context_tokens) + sinks)),
            decode_state=Elements(shift + window_elements(model, min(window - 1, context_tokens) + sinks)),
            saved=saved_elements(model) + saved_windows(model, self.window_chunks + self.sinks / self.chunk),
        )
