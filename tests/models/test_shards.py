"""Layers on shards of a sequence against one rank: real messages between threads."""

import pytest
import torch
from torch import Tensor

from models.backbone import Backbone
from models.loss import token_losses
from parallel.sequence.context import WholeSequence
from tests.models.shards import run_on_shards
from tests.models.tiny import HYBRID, tiny_batch, tiny_model

PATTERNS = [
    ["kvm"],
    ["rwkv7"],
    ["sliding_window"],
    ["block_window"],
    ["ovq"],
    ["rwkv7", "sliding_window"],
    HYBRID,
]
CUTS = [[32], [32, 96], [64, 96, 128]]


def on_one_rank(model: Backbone, ids: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(ids, WholeSequence())
    token_losses(logits, labels)[0].backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("layers", PATTERNS, ids=str)
def test_shards_give_the_bits_and_the_gradients_of_one_rank(layers: list[str], cuts: list[int]) -> None:
    model = tiny_model(layers)
    ids, labels = tiny_batch(149)
    logits, gradients, _ = run_on_shards(model, ids, labels, cuts)
    expected, expected_gradients = on_one_rank(model, ids, labels)

    assert torch.equal(logits, expected)
    for name, whole in expected_gradients.items():
        assert (sum(gradients[name]) - whole).abs().max() <= 2e-6 * whole.abs().max() + 1e-6, name


@pytest.mark.parametrize("layers", PATTERNS, ids=str)
def test_recomputing_activations_repeats_no_message(layers: list[str]) -> None:
    ids, labels = tiny_batch(149)
    runs = [
        run_on_shards(tiny_model(layers, activation_checkpointing=on), ids, labels, [64])
        for on in (False, True)
    ]
    (logits, gradients, sent), (again, gradients_again, sent_again) = runs

    assert sent == sent_again
    assert torch.equal(logits, again)
    for name, parts in gradients.items():
        assert all(map(torch.equal, parts, gradients_again[name])), name


def test_full_attention_refuses_a_split_sequence() -> None:
    ids, labels = tiny_batch(32)
    with pytest.raises(ValueError, match=r"full_attention.*parallel\.sequence=1"):
        run_on_shards(tiny_model(["full_attention"]), ids, labels, [16])
