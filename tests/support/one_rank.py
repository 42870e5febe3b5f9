"""Sequences that one rank holds whole, without a process group."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from kvm_dist.sequence_split import SequenceSplit
from models.config import ModelConfig
from models.sequence_shards import sequence_shards


def whole_sequences(model: ModelConfig, tokens: int) -> SequenceSplit:
    world = SimpleNamespace(rank=0, device=torch.device("cpu"))
    mesh = SimpleNamespace(sequence_size=1, sequence_rank=0, world=world)
    return SequenceSplit(cast(Any, mesh), sequence_shards(model, tokens, 1))
