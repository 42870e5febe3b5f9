"""What `bench kvm` measures: the shape of the inputs, the lengths, and who runs on them. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from models.budget import FixedBudget, PowerLawBudget, SlotBudget

FULL_ATTENTION, REFERENCE = "full attention", "reference, 16*sqrt"
BUDGETS: dict[str, SlotBudget] = {"KVM-256": FixedBudget(slots=256), "KVM 16*sqrt": PowerLawBudget()}


@dataclass(frozen=True)
class Setting:
    """One bench. Lengths in tokens; a contender runs only up to its longest length."""

    lengths: tuple[int, ...] = (8_192, 32_768, 65_536)
    batch: int = 1
    heads: int = 8
    width: int = 64
    chunk: int = 256
    window_chunks: int = 2
    rotary_dims: int = 32
    device: Literal["cpu"] = "cpu"
    threads: int = 2
    repeats: int = 3
    longest_reference: int = 8_192
    decode_context: int = 32_768
    memory_length: int = 32_768
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths={self.lengths}: want one length or more, each at least 1 token")
        for name in ("threads", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: want at least 1")

    def contenders(self, length: int) -> tuple[str, ...]:
        """Who is timed at a length, in the order in which they take turns."""
        reference = (REFERENCE,) if length <= self.longest_reference else ()
        return (*BUDGETS, FULL_ATTENTION, *reference)

    def rounds(self, length: int) -> int:
        """Short lengths take more turns: they cost little and scatter more."""
        if length <= 8_192:
            return 2 * self.repeats - 1
        return self.repeats if length <= 32_768 else 1


QUICK = Setting(
    lengths=(2_048, 8_192),
    repeats=1,
    longest_reference=2_048,
    decode_context=8_192,
    memory_length=8_192,
)
