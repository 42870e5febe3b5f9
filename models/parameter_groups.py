"""Learning-rate and decay scales of every parameter: muP over the width, no decay on vectors and scalars."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from models.backbone import Backbone
from models.layers.low_rank import LowRank


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share the factors on the run's learning rate and weight decay."""

    names: tuple[str, ...]
    learning_rate_scale: float
    weight_decay_scale: float


def parameter_groups(model: Backbone) -> list[ParameterGroup]:
    """Every parameter once, in as few groups as there are different factors.

    A matrix (the head included) with d_in inputs: learning rate x base_width/d_in, decay x d_in/base_width.
    The second matrix of a low-rank map: the same with its rank over the rank it would have at the base width.
    The embedding: both unscaled. Vectors and scalars: learning rate unscaled, no decay.
    """
    members: dict[tuple[float, float], list[str]] = defaultdict(list)
    matrices = dict(_matrix_ratios(model, "", model.config.base_width))
    for name, _ in model.named_parameters():
        if name in matrices:
            ratio = matrices[name]
            members[1 / ratio, ratio].append(name)
        else:
            members[1.0, 1.0 if name == "embedding.weight" else 0.0].append(name)
    return [ParameterGroup(tuple(names), *scales) for scales, names in members.items()]


def _matrix_ratios(module: nn.Module, prefix: str, base_width: int) -> Iterator[tuple[str, float]]:
    """Name of every matrix and its inputs over the inputs at the base width."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            base = base_width
            if isinstance(module, LowRank) and child is module.up:
                base = module.base_rank
            yield f"{prefix}{name}.weight", child.in_features / base
        else:
            yield from _matrix_ratios(child, f"{prefix}{name}.", base_width)
