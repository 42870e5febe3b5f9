"""What a model is made of: one frozen type per layer kind and the layer pattern. Imports no torch."""

import math
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from models.budget import Budget, PowerLawBudget
from parallel.config import FrozenConfig


class LayerConfig(FrozenConfig):
    """Settings of one layer kind; `implementation` names its class as `module:Class`."""

    implementation: ClassVar[str]

    @property
    def position_multiple(self) -> int:
        """Shards of a sequence must start at multiples of this."""
        return 1


class KVMConfig(LayerConfig):
    """Key-Value Means: softmax over a block window and a growing state of key-value slots (arXiv 2605.09877)."""

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
        return 32  # the block of the chunk form in matmuls


class SlidingWindowConfig(LayerConfig):
    """Causal attention over the last `window` tokens."""

    implementation: ClassVar[str] = "models.layers.sliding_window:SlidingWindow"

    window: int = Field(256, ge=1)
    rotary_dims: int | None = Field(None, ge=0, description="null: the whole head width")


class FullAttentionConfig(LayerConfig):
    """Causal attention over all tokens."""

    implementation: ClassVar[str] = "models.layers.full_attention:FullAttention"

    rotary_dims: int | None = Field(None, ge=0, description="null: half of the head width")


class ModelConfig(FrozenConfig):
    """A GPTAlpha-2 backbone whose layers follow `layers`, repeated over `num_layers`."""

    vocab_size: int = Field(256, ge=2)
    hidden_size: int = Field(768, ge=1)
    num_layers: int = Field(12, ge=1)
    num_heads: int = Field(6, ge=1, description="heads of the attention kinds")
    head_dim: int | None = Field(None, ge=1, description="null: hidden_size / num_heads")
    layers: list[str] = Field(["kvm", "rwkv7"], min_length=1, description="pattern of layer kinds")
    ffn_expansion: float = Field(4.0, gt=0)
    residual_scale: float | None = Field(
        None, gt=0, description="null: 12 / num_layers, 1 at most (CompleteP)"
    )
    rotary_base: float = Field(10_000.0, gt=0)
    base_width: int = Field(768, ge=1, description="width at which learning rate and decay are given (muP)")
    value_residual: bool = True
    token_shift: bool = True
    activation_checkpointing: bool = False

    kvm: KVMConfig = KVMConfig()
    rwkv7: RWKV7Config = RWKV7Config()
    sliding_window: SlidingWindowConfig = SlidingWindowConfig()
    full_attention: FullAttentionConfig = FullAttentionConfig()

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def ffn_width(self) -> int:
        return int(self.ffn_expansion * self.hidden_size) // 32 * 32

    @property
    def depth_scale(self) -> float:
        return self.residual_scale if self.residual_scale is not None else min(1.0, 12 / self.num_layers)

    @property
    def layer_kinds(self) -> list[str]:
        """The kind of every layer, first to last."""
        return [self.layers[index % len(self.layers)] for index in range(self.num_layers)]

    @property
    def position_multiple(self) -> int:
        """Shards of a sequence must start at multiples of this: whole blocks of every kind in use."""
        return math.lcm(*(self.layer_config(kind).position_multiple for kind in set(self.layer_kinds)))

    def layer_config(self, kind: str) -> LayerConfig:
        config: Any = getattr(self, kind)
        return config

    @classmethod
    def known_kinds(cls) -> list[str]:
        """Kinds are the fields whose type is a LayerConfig: adding a field adds a kind."""
        fields = cls.model_fields.items()
        return [
            name
            for name, f in fields
            if isinstance(f.annotation, type) and issubclass(f.annotation, LayerConfig)
        ]

    @model_validator(mode="after")
    def _layers_are_known(self) -> "ModelConfig":
        unknown = sorted(set(self.layers) - set(self.known_kinds()))
        if unknown:
            raise ValueError(f"model.layers: unknown kind {unknown}; known kinds are {self.known_kinds()}")
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} is not divisible by model.num_heads={self.num_heads}; "
                "change one of them or give model.head_dim"
            )
        return self
