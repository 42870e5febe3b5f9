"""The layer kinds and their settings. Imports no torch."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from models.budget import Budget, PowerLawBudget
from models.layer_config import LayerConfig, low_rank, rotary_problems

if TYPE_CHECKING:
    from models.config import ModelConfig


class KVMConfig(LayerConfig):
    """Key-Value Means: softmax over a block window and a growing state of slots (arXiv 2605.09877)."""

    implementation: ClassVar[str] = "models.layers.kvm:KVM"

    chunk: int = Field(256, ge=1, description="tokens of a block")
    window_chunks: int = Field(2, ge=1, description="blocks of the window, the current one included")
    sinks: int = Field(1, ge=0, description="first slots that are read and never written")
    rotary_dims: int | None = Field(None, ge=0, description="null: half of the head width")
    budget: Budget = PowerLawBudget()
    max_slots: int | None = Field(None, ge=1, description="hard cap on the slots; null: none")
    head_temperatures: bool = True
    merge_gate: bool = True
    gate_appends: bool = False
    gate_first_state: bool = False
    value_radius: bool = True
    backend: Literal["auto", "reference", "torch", "triton"] = "auto"

    @property
    def position_multiple(self) -> int:
        return self.chunk

    @property
    def halo_tokens(self) -> int:
        return max(1, (self.window_chunks - 1) * self.chunk)

    def rotary(self, head_width: int) -> int:
        return head_width // 2 // 2 * 2 if self.rotary_dims is None else self.rotary_dims

    def problems(self, model: "ModelConfig") -> list[str]:
        return rotary_problems("kvm", self.rotary(model.head_width), model.head_width, below=True)


class RWKV7Config(LayerConfig):
    """RWKV-7: a linear recurrence with a generalised delta rule."""

    implementation: ClassVar[str] = "models.layers.rwkv7:RWKV7"

    head_dim: int = Field(64, ge=1)
    decay_rank: int | None = Field(None, ge=1, description="null: 1.8*sqrt(d) rounded to 32")
    rate_rank: int | None = Field(None, ge=1, description="null: 1.8*sqrt(d) rounded to 32")
    value_rank: int | None = Field(None, ge=1, description="null: 1.3*sqrt(d) rounded to 32")
    gate_rank: int | None = Field(None, ge=1, description="null: 0.6*d^0.8 rounded to 32")

    @property
    def position_multiple(self) -> int:
        return 32  # the chunk of the recurrence

    def ranks(self, width: int) -> dict[str, int]:
        """Ranks of the low-rank maps decay, rate, value and gate at a hidden width."""
        return {
            "decay": self.decay_rank or low_rank(width, 1.8),
            "rate": self.rate_rank or low_rank(width, 1.8),
            "value": self.value_rank or low_rank(width, 1.3),
            "gate": self.gate_rank or low_rank(width, 0.6, 0.8),
        }

    def problems(self, model: "ModelConfig") -> list[str]:
        if model.hidden_size % self.head_dim == 0:
            return []
        return [
            f"model.hidden_size={model.hidden_size} is not divisible by "
            f"model.rwkv7.head_dim={self.head_dim}; change one of them"
        ]


class SlidingWindowConfig(LayerConfig):
    """Causal attention over the last `window` tokens."""

    implementation: ClassVar[str] = "models.layers.sliding_window:SlidingWindow"

    window: int = Field(256, ge=2)
    rotary_dims: int | None = Field(None, ge=0, description="null: the whole head width")

    @property
    def position_multiple(self) -> int:
        return self.window  # queries are read in blocks of one window

    @property
    def halo_tokens(self) -> int:
        return max(1, self.window - 1)

    def rotary(self, head_width: int) -> int:
        return head_width // 2 * 2 if self.rotary_dims is None else self.rotary_dims

    def problems(self, model: "ModelConfig") -> list[str]:
        return rotary_problems("sliding_window", self.rotary(model.head_width), model.head_width)


class FullAttentionConfig(LayerConfig):
    """Causal attention over all tokens."""

    implementation: ClassVar[str] = "models.layers.full_attention:FullAttention"

    rotary_dims: int | None = Field(None, ge=0, description="null: half of the head width")

    def rotary(self, head_width: int) -> int:
        return head_width // 2 // 2 * 2 if self.rotary_dims is None else self.rotary_dims

    def problems(self, model: "ModelConfig") -> list[str]:
        return rotary_problems("full_attention", self.rotary(model.head_width), model.head_width)
