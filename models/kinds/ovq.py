"""Settings and cost of online vector quantisation. Imports no torch."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

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


class OVQConfig(AttentionConfig):
    """Attention to the current chunk and to centroids of all complete chunks before it."""

    implementation: ClassVar[str] = "models.layers.ovq:OVQ"

    rotary_dims: int | None = Field(0, ge=0, description="the paper rotates none; null: half of the head")
    chunk: int = Field(256, ge=1, description="tokens between two updates of the centroids")
    max_centroids: int = Field(1024, ge=1, description="centroids that an endless sequence approaches")

    @property
    def position_multiple(self) -> int:
        return self.chunk

    def centroids_at(self, tokens: int) -> int:
        """Centroids once `tokens` tokens, whole chunks, are quantised."""
        return tokens * self.max_centroids // (tokens + self.max_centroids) if tokens else 0

    def cost(self, model: "ModelConfig", context_tokens: int) -> MixerCost:
        heads, width = model.num_heads, model.head_width
        read = self.centroids_at((context_tokens - 1) // self.chunk * self.chunk)
        handed = self.centroids_at(context_tokens // self.chunk * self.chunk)
        shift, open_tokens = shift_elements(model), context_tokens % self.chunk
        flops = projection_flops(model) + read_flops(model, read + min(context_tokens, self.chunk))
        state = heads * handed * (2 * width + 1)
        return MixerCost(
            projection_parameters(model, head_norms=False) + heads,
            flops + 2 * heads * width * read,
            boundary=Elements(shift, state),
            decode_state=Elements(shift + window_elements(model, open_tokens), state),
            saved=saved_elements(model) + self._saved_reads(model, read),
        )

    def _saved_reads(self, model: "ModelConfig", centroids: int) -> Elements:
        """Of one token of a chunk: its share of the keys and values that the chunk reads, its row of the
        mask, and its share of the means before the chunk is folded in."""
        width, means = model.num_heads * model.head_width, centroids / self.chunk
        keys_and_values = int(2 * width * (means + 1))
        mask = model.num_heads * (centroids + self.chunk)
        return Elements(keys_and_values + mask, int(2 * width * means))
