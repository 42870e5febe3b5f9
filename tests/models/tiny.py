"""Small models and data for tests."""

from typing import Any

import torch
from torch import Tensor

from models.backbone import Backbone
from models.budget import PowerLawBudget
from models.config import (
    BlockWindowConfig,
    DeltaNetConfig,
    GatedDeltaNetConfig,
    GLAConfig,
    KDAConfig,
    KVMConfig,
    Mamba2Config,
    ModelConfig,
    OVQConfig,
    RWKV7Config,
    SlidingWindowConfig,
)
from models.initialise import initialise

HYBRID = ["kvm", "rwkv7", "sliding_window", "kvm"]
RECURRENCES = ["gated_deltanet", "kda", "mamba2"]  # of flash-linear-attention
SIMPLER_RECURRENCES = ["deltanet", "gla"]  # without decay, without a convolution


def tiny_config(layers: list[str], **changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "vocab_size": 37,
        "hidden_size": 32,
        "num_layers": len(layers),
        "num_heads": 2,
        "layers": layers,
        "base_width": 32,
        "kvm": KVMConfig(chunk=16, budget=PowerLawBudget(factor=3, minimum=16)),
        "rwkv7": RWKV7Config(head_dim=16),
        "sliding_window": SlidingWindowConfig(window=8),
        "block_window": BlockWindowConfig(chunk=8, window_chunks=3, sinks=2),
        "ovq": OVQConfig(chunk=8, max_centroids=24),
        "gated_deltanet": GatedDeltaNetConfig(num_heads=4, head_dim=6),
        "kda": KDAConfig(num_heads=4, head_dim=8, expand_v=1.5),
        "deltanet": DeltaNetConfig(num_heads=4, head_dim=6),
        "gla": GLAConfig(num_heads=4, decay_rank=8),
        "mamba2": Mamba2Config(head_dim=8, state_size=12, expand=1.0),
    }
    return ModelConfig(**(values | changes))


def tiny_model(layers: list[str], **changes: Any) -> Backbone:
    """A model whose every part matters: output matrices and low-rank maps are not left at zero."""
    model = Backbone(tiny_config(layers, **changes))
    initialise(model, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
        model.embedding.weight.normal_(generator=generator)
    return model


def tiny_batch(tokens: int, batch: int = 2, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Input ids and labels, one label in seven ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(37, (batch, tokens + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:, 3::7] = -100
    return ids[:, :-1], labels
