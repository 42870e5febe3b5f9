"""Gradients that end at shard edges are those of states that are constants there."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from models.backbone import Backbone
from models.loss import IGNORED_LABEL
from tests.models.shards import run_on_shards
from tests.models.tiny import HYBRID, RECURRENCES, tiny_batch, tiny_model

PATTERNS = [
    ["kvm"],
    ["rwkv7"],
    ["sliding_window"],
    ["block_window"],
    ["ovq"],
    ["full_attention"],
    HYBRID,
    RECURRENCES,
]
BOUNDS = [0, 64, 96, 149]
CUTS = BOUNDS[1:-1]


def gradients_of_own_losses(model: Backbone, ids: Tensor, labels: Tensor) -> list[dict[str, Tensor]]:
    """Of each shard's loss alone, in the shard's own copy of the parameters: for it, what the copies of the
    shards before have made is constant."""
    found = []
    for rank, (start, stop) in enumerate(pairwise(BOUNDS)):
        own = torch.full_like(labels, IGNORED_LABEL)
        own[:, start:stop] = labels[:, start:stop]
        _, gradients, _ = run_on_shards(model, ids, own, CUTS)
        found.append({name: parts[rank] for name, parts in gradients.items()})
    return found


@pytest.mark.parametrize("layers", PATTERNS, ids=str)
def test_each_rank_learns_as_if_the_states_it_was_given_were_constants(layers: list[str]) -> None:
    model = tiny_model(layers)
    ids, labels = tiny_batch(BOUNDS[-1])
    wanted = gradients_of_own_losses(model, ids, labels)
    _, gradients, _ = run_on_shards(model, ids, labels, CUTS, truncate_gradients=True)

    for rank, of_rank in enumerate(wanted):
        for name, gradient in of_rank.items():
            error = (gradients[name][rank] - gradient).abs().max()
            assert error <= 2e-6 * gradient.abs().max() + 1e-6, f"{name} on rank {rank}"


@pytest.mark.parametrize("layers", PATTERNS, ids=str)
def test_the_forward_stays_and_no_gradient_is_sent(layers: list[str]) -> None:
    model = tiny_model(layers)
    ids, labels = tiny_batch(BOUNDS[-1])
    logits, gradients, sent = run_on_shards(model, ids, labels, CUTS, truncate_gradients=True)
    whole_logits, whole_gradients, whole_sent = run_on_shards(model, ids, labels, CUTS)

    assert torch.equal(logits, whole_logits)
    for of_rank, whole_of_rank in zip(sent, whole_sent, strict=True):
        assert of_rank == [message for message in whole_of_rank if message[0] == "next"]
    changes = [(gradients[name][0] - parts[0]).abs().max() for name, parts in whole_gradients.items()]
    assert max(changes) > 1e-4, "the first rank still learns from those after it"
