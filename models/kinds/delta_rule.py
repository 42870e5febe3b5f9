"""What the settings and the costs of the delta rules with decay share. Imports no torch."""

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from models.kinds.recurrence import CHUNK, RecurrenceConfig, RecurrenceHeads

if TYPE_CHECKING:
    from models.config import ModelConfig


class DeltaRuleConfig(RecurrenceConfig):
    """A state from which a part of what a key held is removed before its new value is written."""

    widest_key: ClassVar[int | None] = 256
    state_flops: ClassVar[int] = 7  # decay 1, removal 2, rank-1 update 2, read 2

    num_heads: int | None = Field(None, ge=1, description="null: those of attention")
    head_dim: int | None = Field(None, ge=1, description="of queries and keys; null: as published")
    expand_v: float = Field(1.0, gt=0, description="width of a head's values over that of its keys")
    negative_eigenvalues: bool = Field(False, description="rates up to 2: a state may change its sign")

    def default_key(self, model: "ModelConfig", heads: int) -> int:
        """Width of a head's keys where the settings give none."""
        raise NotImplementedError

    def heads(self, model: "ModelConfig") -> RecurrenceHeads:
        number = model.num_heads if self.num_heads is None else self.num_heads
        key = self.head_dim or max(self.default_key(model, number), 1)
        return RecurrenceHeads(number, key, round(key * self.expand_v), key_groups=number)

    def problems(self, model: "ModelConfig", kind: str) -> list[str]:
        key = self.heads(model).key
        if (key * self.expand_v).is_integer():
            return []
        return [
            f"model.{kind}.expand_v={self.expand_v} x head_dim={key} is {key * self.expand_v}, no whole "
            "number; change one of them"
        ]

    def transition(self, heads: RecurrenceHeads) -> int:
        return heads.number * heads.key**2

    def saved_of_rule(self, heads: RecurrenceHeads) -> int:
        """In float32, of one token: unit keys, scores and the system, its right side and solution, factors
        and maps, the state before the chunk, the reads; what decays are made from left out."""
        scores, states = 4 * CHUNK * heads.number, (heads.state + self.transition(heads)) // CHUNK
        return 9 * heads.key_width + 3 * heads.value_width + scores + states + 5 * heads.number

    def saved_projections(self, heads: RecurrenceHeads) -> int:
        """In the model's dtype: convolutions before and within SiLU, the normed reads."""
        return 2 * heads.projected + 2 * heads.value_width
