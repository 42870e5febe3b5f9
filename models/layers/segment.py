"""Activation checkpointing of the work between two hand-overs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def segment(recompute: bool, function: Callable[..., Any], *inputs: Tensor) -> Any:
    """`function(*inputs)`; with `recompute` its activations are computed again in the backward.

    `function` must not talk to other ranks: a repeated message would meet no partner.
    """
    if recompute and torch.is_grad_enabled():
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return function(*inputs)
