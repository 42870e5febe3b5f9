"""Settings and cost of Mamba-2. Imports no torch."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from models.kinds.recurrence import CHUNK, TAPS, RecurrenceConfig, RecurrenceHeads
from models.layer_config import Elements

if TYPE_CHECKING:
    from models.config import ModelConfig


class Mamba2Config(RecurrenceConfig):
    """Mamba-2: linear attention with one decay a head, whose step sizes scale values too (arXiv 2405.21060).

    Its C, B and x are our queries, keys and values, its z our gate.
    """

    implementation: ClassVar[str] = "models.layers.mamba2:Mamba2"
    op: ClassVar[str] = "chunk_simple_gla"
    state_flops: ClassVar[int] = 5  # decay 1, rank-1 update 2, read 2

    expand: float = Field(2.0, gt=0, description="width of all values over hidden_size")
    head_dim: int = Field(64, ge=1, description="of values")
    state_size: int = Field(128, ge=1, description="width of queries and keys")
    groups: int = Field(1, ge=1, description="heads of queries and keys, shared evenly by those of values")

    def inner(self, model: "ModelConfig") -> int:
        return round(self.expand * model.hidden_size)

    def heads(self, model: "ModelConfig") -> RecurrenceHeads:
        number = self.inner(model) // self.head_dim
        return RecurrenceHeads(number, self.state_size, self.head_dim, key_groups=self.groups)

    def control_matrices(self, model: "ModelConfig") -> int:
        heads = self.heads(model)
        return model.hidden_size * (heads.value_width + heads.number)  # gate; steps

    def vectors(self, model: "ModelConfig") -> int:
        heads = self.heads(model)
        return (TAPS + 1) * heads.projected + 3 * heads.number + heads.value_width

    def problems(self, model: "ModelConfig", kind: str) -> list[str]:
        inner = self.inner(model)
        if inner % self.head_dim or inner != self.expand * model.hidden_size:
            return [
                f"model.{kind}.expand={self.expand} x model.hidden_size={model.hidden_size} must be a "
                f"multiple of model.{kind}.head_dim={self.head_dim}; change one of them"
            ]
        if (inner // self.head_dim) % self.groups:
            return [
                f"model.{kind}.groups={self.groups} does not divide the {inner // self.head_dim} heads of "
                f"model.{kind}; change groups or head_dim"
            ]
        return []

    def control_outputs(self, heads: RecurrenceHeads) -> int:
        return heads.number + heads.value_width  # steps; values through the skip

    def transition(self, heads: RecurrenceHeads) -> int:
        return heads.number

    def saved_in_full(self, heads: RecurrenceHeads) -> Elements:
        """Convolutions before and within SiLU, values, the gate, the normed reads; in float32 steps, decays
        between tokens and scores, factors of every head, chunks, the state before them, the reads."""
        per_head = 2 * CHUNK + 8 + 2 * heads.key
        chunks = CHUNK * heads.key_groups + 2 * heads.key_width + 3 * heads.value_width
        wide = heads.number * per_head + chunks + heads.state // CHUNK
        return Elements(2 * heads.projected + 5 * heads.value_width, wide)
