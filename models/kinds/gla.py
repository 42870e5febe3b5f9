"""Settings and cost of gated linear attention. Imports no torch."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from models.kinds.recurrence import CHUNK, RecurrenceConfig, RecurrenceHeads
from models.layer_config import Elements

if TYPE_CHECKING:
    from models.config import ModelConfig


class GLAConfig(RecurrenceConfig):
    """Gated linear attention: a decay for every channel of a key, no convolution (arXiv 2312.06635)."""

    implementation: ClassVar[str] = "models.layers.gla:GLA"
    op: ClassVar[str] = "chunk_gla"
    state_flops: ClassVar[int] = 5  # decay 1, rank-1 update 2, read 2
    convolves: ClassVar[bool] = False

    num_heads: int | None = Field(None, ge=1, description="null: those of attention")
    expand_k: float = Field(0.5, gt=0, description="width of all keys over hidden_size")
    expand_v: float = Field(1.0, gt=0, description="width of all values over hidden_size")
    decay_rank: int = Field(16, ge=1)
    decay_divisor: float = Field(16.0, gt=0, description="of log decays: a larger one forgets slower")

    def heads(self, model: "ModelConfig") -> RecurrenceHeads:
        number = model.num_heads if self.num_heads is None else self.num_heads
        key, value = (round(part * model.hidden_size) // number for part in (self.expand_k, self.expand_v))
        return RecurrenceHeads(number, key, value, key_groups=number)

    def control_matrices(self, model: "ModelConfig") -> int:
        width, heads = model.hidden_size, self.heads(model)
        return width * heads.value_width + self.decay_rank * (width + heads.key_width)  # gate; decays

    def vectors(self, model: "ModelConfig") -> int:
        heads = self.heads(model)
        return heads.key_width + heads.value  # the decays' bias, the norm

    def problems(self, model: "ModelConfig", kind: str) -> list[str]:
        heads, width = self.heads(model), model.hidden_size
        made = {"expand_k": heads.key_width, "expand_v": heads.value_width}
        return [
            f"model.{kind}.{name}={getattr(self, name)} x model.hidden_size={width} must be a multiple of "
            f"the {heads.number} heads of model.{kind}; change one of them"
            for name, channels in made.items()
            if channels == 0 or channels != getattr(self, name) * width
        ]

    def control_outputs(self, heads: RecurrenceHeads) -> int:
        return heads.key_width

    def transition(self, heads: RecurrenceHeads) -> int:
        return heads.key_width

    def saved_in_full(self, heads: RecurrenceHeads) -> Elements:
        """Decays, pairs within the smallest blocks, factors of the blocks below and of the chunk, scores, the
        state before the chunk, reads, the gate, the normed reads."""
        scores = CHUNK * heads.number + heads.state // CHUNK
        wide = 29 * heads.key_width + scores + 2 * heads.value_width
        return Elements(5 * heads.value_width + self.decay_rank, wide)
