"""What every sequence mixer is: a module built from its layer kind's settings."""

from importlib import import_module
from typing import TypeVar

import torch
from torch import Tensor, nn

from models.config import LayerConfig, ModelConfig
from parallel.sequence.context import SequenceContext

Config = TypeVar("Config", bound=LayerConfig)


class Mixer(nn.Module):
    """Mixes tokens along the sequence. `name` labels its messages, e.g. "3.kvm"."""

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__()
        self.kind = model.layer_kinds[index]
        self.index = index
        self.name = f"{index}.{self.kind}"

    def first_value(self, x0: Tensor, context: SequenceContext) -> Tensor:
        """The values of the normed embedding [B, T, d], asked of the first layer of each kind and given to
        all layers of that kind. Kinds without a value residual return what they were given."""
        return x0

    def forward(self, x: Tensor, first_value: Tensor, context: SequenceContext) -> Tensor:
        """x [B, T, d] normed -> [B, T, d]."""
        raise NotImplementedError

    def initialise(self, generator: torch.Generator) -> None:
        """Fill the parameters held directly by this module; modules inside fill their own."""


def settings(model: ModelConfig, index: int, config_type: type[Config]) -> Config:
    """The settings of layer `index`, which must be of the given type."""
    config = model.layer_config(model.layer_kinds[index])
    assert isinstance(config, config_type), f"layer {index} is configured by {type(config).__name__}"
    return config


def build_mixer(model: ModelConfig, index: int) -> Mixer:
    """The mixer that layer `index` of the pattern names."""
    module, name = model.layer_config(model.layer_kinds[index]).implementation.split(":")
    mixer: Mixer = getattr(import_module(module), name)(model, index)
    return mixer
