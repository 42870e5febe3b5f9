"""What every layer kind states about itself: its class, where sequences may be cut, its cost. No torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from parallel.config import FrozenConfig

if TYPE_CHECKING:
    from models.config import ModelConfig


@dataclass(frozen=True)
class Elements:
    """Numbers held or sent for one sequence."""

    model_dtype: int = 0  # in the dtype of the model's activations
    float32: int = 0  # in float32 whatever the model's dtype: accumulated states

    def size(self, element_bytes: int) -> int:
        """Bytes, with `element_bytes` for one number of the model's dtype."""
        return self.model_dtype * element_bytes + self.float32 * 4

    def __add__(self, other: "Elements") -> "Elements":
        return Elements(self.model_dtype + other.model_dtype, self.float32 + other.float32)


@dataclass(frozen=True)
class MixerCost:
    """One sequence mixer once a context of some length was read."""

    parameters: int
    forward_flops: float  # of the last token: projections, reads, and its share of the state's update
    boundary: Elements  # handed over a shard edge that lies there; nothing if a sequence cannot be cut
    decode_state: Elements  # kept to go on by one token
    first_boundary: Elements = Elements()  # handed over besides by the first layer of the kind
    saved: Elements = Elements()  # kept for the backward of the last token, beside states handed over


class LayerConfig(FrozenConfig):
    """Settings of one layer kind; `implementation` names its class as `module:Class`."""

    implementation: ClassVar[str]
    reads_by_heads: ClassVar[bool] = False  # ranks that divide the heads share its reads, wherever cuts lie

    @property
    def position_multiple(self) -> int:
        """Shards of a sequence must start at multiples of this."""
        return 1

    def problems(self, model: "ModelConfig", kind: str) -> list[str]:
        """What is wrong with these settings under `model.<kind>`, each with the way to mend it."""
        return []

    def cost(self, model: "ModelConfig", context_tokens: int) -> MixerCost:
        """Parameters, FLOPs and state of one such mixer when `context_tokens` tokens were read."""
        raise NotImplementedError(f"{type(self).__name__} does not state its cost; define its method `cost`")


def low_rank(width: int, factor: float, exponent: float = 0.5) -> int:
    """The rank of a low-rank map: `factor * width**exponent` rounded to a multiple of 32, at least 32."""
    return max(32, 32 * round(factor * width**exponent / 32))
