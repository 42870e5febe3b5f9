"""What the settings and the costs of the recurrences of flash-linear-attention share. Imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from models.layer_config import Elements, LayerConfig, MixerCost

if TYPE_CHECKING:
    from models.config import ModelConfig

CHUNK = 32  # tokens of a chunk of the recurrence in matmuls
KERNEL_CHUNK = 64  # of the chunk kernels of flash-linear-attention
TAPS = 4  # tokens that a short convolution reads, the current one included

Backend = Literal["auto", "fla", "torch"]


@dataclass(frozen=True)
class RecurrenceHeads:
    """number: of states [key, value], one a head. key_groups: heads of queries and keys, each shared by as
    many states."""

    number: int
    key: int
    value: int
    key_groups: int

    @property
    def key_width(self) -> int:
        return self.key_groups * self.key

    @property
    def value_width(self) -> int:
        return self.number * self.value

    @property
    def projected(self) -> int:
        """Channels of a query, a key and a value."""
        return 2 * self.key_width + self.value_width

    @property
    def state(self) -> int:
        return self.number * self.key * self.value


class RecurrenceConfig(LayerConfig):
    """A linear recurrence over a state [K, V] per head."""

    op: ClassVar[str]  # that of flash-linear-attention
    widest_key: ClassVar[int | None] = None  # that the op takes
    refused_dtypes: ClassVar[tuple[str, ...]] = ("float64",)
    state_flops: ClassVar[int]  # of one number of the state and one token
    convolves: ClassVar[bool] = True  # queries, keys and values pass a short causal convolution

    backend: Backend = "auto"

    @property
    def position_multiple(self) -> int:
        return KERNEL_CHUNK

    def heads(self, model: "ModelConfig") -> RecurrenceHeads:
        raise NotImplementedError(f"{type(self).__name__} does not state its heads")

    def control_matrices(self, model: "ModelConfig") -> int:
        """Elements of the matrices beside those of query, key, value and output."""
        raise NotImplementedError(f"{type(self).__name__} does not state its gates' matrices")

    def vectors(self, model: "ModelConfig") -> int:
        """Parameters that are in no matrix, those of the convolution included."""
        raise NotImplementedError(f"{type(self).__name__} does not state its vectors")

    def control_outputs(self, heads: RecurrenceHeads) -> int:
        """Numbers of one token that decays, rates and skips are made from."""
        raise NotImplementedError(f"{type(self).__name__} does not state its controls")

    def transition(self, heads: RecurrenceHeads) -> int:
        """Numbers that say what a chunk keeps of the state before it."""
        raise NotImplementedError(f"{type(self).__name__} does not state its transitions")

    def saved_in_full(self, heads: RecurrenceHeads) -> Elements:
        """Kept for the backward of one token where nothing is computed again."""
        raise NotImplementedError(f"{type(self).__name__} does not state what it keeps for the backward")

    def _saved(self, model: "ModelConfig") -> Elements:
        """By the recurrence in matmuls, of a chunk's maps and state one token's share; kernels keep less."""
        heads = self.heads(model)
        if not model.activation_checkpointing:
            return self.saved_in_full(heads)
        projected = heads.projected + self.control_outputs(heads) + heads.value_width
        maps = heads.number * heads.key + (self.transition(heads) + heads.state) // CHUNK
        return Elements(projected, maps + heads.value_width)

    def cost(self, model: "ModelConfig", context_tokens: int) -> MixerCost:
        heads = self.heads(model)
        matrices = model.hidden_size * (heads.projected + heads.value_width) + self.control_matrices(model)
        taps = TAPS if self.convolves else 1
        kept = Elements(min(taps - 1, context_tokens) * heads.projected, heads.state)
        flops = 2 * matrices + self.state_flops * heads.state
        if self.convolves:
            flops += 2 * taps * heads.projected
        return MixerCost(
            parameters=matrices + self.vectors(model),
            forward_flops=flops,
            boundary=kept,
            decode_state=kept,
            saved=self._saved(model),
        )
