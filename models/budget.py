"""How many state slots a KVM layer may hold: pure integer functions of the position. Imports no torch."""

from abc import abstractmethod
from typing import Annotated, Literal

from pydantic import Field

from parallel.config import FrozenConfig


class SlotBudget(FrozenConfig):
    """A schedule of slots over the context length, before the caps by tokens and `max_slots`."""

    @abstractmethod
    def slots_at(self, context_tokens: int) -> int:
        """Slots allowed once `context_tokens` tokens were read, the minimum included."""


class FixedBudget(SlotBudget):
    """A constant number of slots."""

    kind: Literal["fixed"] = "fixed"
    slots: int = Field(256, ge=1)

    def slots_at(self, context_tokens: int) -> int:
        return self.slots


class PowerLawBudget(SlotBudget):
    """`floor(factor * tokens**exponent)`, rounded down to a multiple of `round_down`, at least `minimum`."""

    kind: Literal["power_law"] = "power_law"
    factor: float = Field(16.0, gt=0)
    exponent: float = Field(0.5, gt=0, le=1)
    minimum: int = Field(256, ge=1)
    round_down: int = Field(1, ge=1)

    def slots_at(self, context_tokens: int) -> int:
        slots = int(self.factor * context_tokens**self.exponent)
        return max(slots - slots % self.round_down, self.minimum)


class SaturatingBudget(SlotBudget):
    """`floor(limit * tokens / (limit + tokens))`, rounded down likewise: linear at first, then level."""

    kind: Literal["saturating"] = "saturating"
    limit: int = Field(1024, ge=1)
    minimum: int = Field(1, ge=1)
    round_down: int = Field(1, ge=1)

    def slots_at(self, context_tokens: int) -> int:
        slots = self.limit * context_tokens // (self.limit + context_tokens)
        return max(slots - slots % self.round_down, self.minimum)


Budget = Annotated[FixedBudget | PowerLawBudget | SaturatingBudget, Field(discriminator="kind")]
