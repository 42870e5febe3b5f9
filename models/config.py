"""What a model is made of: the backbone's sizes and the layer pattern. Imports no torch."""

from math import lcm
from typing import Any

from pydantic import Field, model_validator

from models.kinds import (
    BlockWindowConfig,
    DeltaNetConfig,
    FullAttentionConfig,
    GatedDeltaNetConfig,
    GLAConfig,
    KDAConfig,
    KVMConfig,
    Mamba2Config,
    OVQConfig,
    RWKV7Config,
    SlidingWindowConfig,
)
from models.layer_config import LayerConfig
from parallel.config import FrozenConfig

__all__ = [
    "BlockWindowConfig",
    "DeltaNetConfig",
    "FullAttentionConfig",
    "GLAConfig",
    "GatedDeltaNetConfig",
    "KDAConfig",
    "KVMConfig",
    "LayerConfig",
    "Mamba2Config",
    "ModelConfig",
    "OVQConfig",
    "RWKV7Config",
    "SlidingWindowConfig",
]

MOST_LAYERS = 10_000


class ModelConfig(FrozenConfig):
    """A GPTAlpha-2 backbone whose layers follow `layers`, repeated over `num_layers`."""

    # The upper bounds are beyond any model: a slip of the hand must not take all memory.
    vocab_size: int = Field(256, ge=2, le=1 << 30)
    hidden_size: int = Field(768, ge=1, le=1 << 20)
    num_layers: int = Field(12, ge=1, le=MOST_LAYERS)
    num_heads: int = Field(6, ge=1, description="heads of the attention kinds")
    head_dim: int | None = Field(None, ge=1, description="null: hidden_size / num_heads")
    layers: list[str] = Field(["kvm", "rwkv7"], min_length=1, description="pattern of layer kinds")
    ffn_expansion: float = Field(4.0, gt=0, le=1000)
    residual_scale: float | None = Field(
        None, gt=0, description="null: 12 / num_layers, 1 at most (CompleteP)"
    )
    rotary_base: float = Field(10_000.0, gt=0)
    base_width: int = Field(768, ge=1, description="width at which learning rate and decay are given (muP)")
    value_residual: bool = True
    token_shift: bool = True
    feed_forward_shift: bool | None = Field(None, description="null: as token_shift")
    activation_checkpointing: bool = False

    kvm: KVMConfig = KVMConfig()
    rwkv7: RWKV7Config = RWKV7Config()
    sliding_window: SlidingWindowConfig = SlidingWindowConfig()
    full_attention: FullAttentionConfig = FullAttentionConfig()
    block_window: BlockWindowConfig = BlockWindowConfig()
    ovq: OVQConfig = OVQConfig()
    gated_deltanet: GatedDeltaNetConfig = GatedDeltaNetConfig()
    kda: KDAConfig = KDAConfig()
    mamba2: Mamba2Config = Mamba2Config()
    deltanet: DeltaNetConfig = DeltaNetConfig()
    gla: GLAConfig = GLAConfig()

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
    def shifts_feed_forward(self) -> bool:
        return self.token_shift if self.feed_forward_shift is None else self.feed_forward_shift

    @property
    def layer_kinds(self) -> list[str]:
        """The kind of every layer, first to last."""
        return [self.layers[index % len(self.layers)] for index in range(self.num_layers)]

    @property
    def used_layer_configs(self) -> dict[str, LayerConfig]:
        """Kind -> settings of the kinds in use, in order of first use."""
        return {kind: self.layer_config(kind) for kind in self.layer_kinds}

    @property
    def position_multiple(self) -> int:
        """Shards of a sequence must start at multiples of this, whatever layer reads them."""
        return lcm(*(config.position_multiple for config in self.used_layer_configs.values()))

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

    @classmethod
    def kinds_with_backends(cls) -> list[str]:
        """Kinds that can be computed in more than one way."""
        fields = cls.model_fields
        return [kind for kind in cls.known_kinds() if "backend" in type(fields[kind].default).model_fields]

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
        if self.ffn_width == 0:
            raise ValueError(
                f"model.ffn_expansion={self.ffn_expansion} x model.hidden_size={self.hidden_size} is below "
                "32, the multiple that the feed-forward width is rounded down to; raise one of them"
            )
        problems = [p for kind, c in self.used_layer_configs.items() for p in c.problems(self, kind)]
        if problems:
            raise ValueError("\n".join(problems))
        return self
