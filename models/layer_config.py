"""What every layer kind states about itself: its class, where sequences may be cut, its cost. No torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from parallel.config import FrozenConfig

if TYPE_CHECKING:
    from models.config import ModelConfig


@dataclass(frozen=True)
class MixerCost:
    """What one sequence mixer costs at a context of a given length, per sequence."""

    parameters: int
    forward_flops_per_token: float  # the last token's: projections, attention or recurrence, state update
    boundary_elements: int  # handed over one shard edge at that position, in the model's dtype
    boundary_float32_elements: int  # likewise, always float32
    decode_elements: int  # kept to go on token by token, in the model's dtype
    decode_float32_elements: int


class LayerConfig(FrozenConfig):
    """Settings of one layer kind; `implementation` names its class as `module:Class`."""

    implementation: ClassVar[str]

    @property
    def position_multiple(self) -> int:
        """Shards of a sequence must start at multiples of this."""
        return 1

    @property
    def halo_tokens(self) -> int:
        """Most tokens before its own that a shard asks of the shard before: no shard may be shorter."""
        return 1

    def problems(self, model: "ModelConfig") -> list[str]:
        """What is wrong with these settings in this model, each with the way to mend it."""
        return []

    def cost(self, model: "ModelConfig", context_tokens: int) -> MixerCost:
        """Parameters, FLOPs and bytes of one such mixer once `context_tokens` tokens were read."""
        raise NotImplementedError(
            f"{type(self).__name__} does not state its cost; define {type(self).__name__}.cost"
        )


def low_rank(width: int, factor: float, exponent: float = 0.5) -> int:
    """The rank of a low-rank map: `factor * width**exponent` rounded to a multiple of 32, at least 32."""
    return max(32, 32 * round(factor * width**exponent / 32))


def rotary_problems(kind: str, dims: int, head_width: int, below: bool = False) -> list[str]:
    """Why `dims` of a head of `head_width` cannot be rotated. below: at least one dim must stay unrotated."""
    problems = []
    if dims % 2:
        problems.append(f"model.{kind}.rotary_dims={dims} is odd; rotary turns pairs, give an even number")
    if dims > head_width or (below and dims == head_width):
        bound = "less than" if below else "at most"
        problems.append(
            f"model.{kind}.rotary_dims={dims} must be {bound} the head width {head_width}; lower it"
        )
    return problems
