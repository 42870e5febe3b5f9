"""Pads fill the last block and change nothing."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from kvm_dist import sequence_split
from kvm_dist.sequence_split import SequenceSplit
from models.backbone import Backbone
from models.loss import token_losses
from models.sequence_shards import sequence_shards
from parallel.mesh import Mesh
from parallel.sequence.context import WholeSequence
from tests.models.tiny import HYBRID, tiny_batch, tiny_model

TOKENS = 101


def split_on_one_rank(model: Backbone, tokens: int) -> SequenceSplit:
    mesh = SimpleNamespace(
        sequence_size=1, sequence_rank=0, world=SimpleNamespace(device=torch.device("cpu"))
    )
    return SequenceSplit(cast(Mesh, mesh), sequence_shards(model.config, tokens, 1))


@pytest.mark.parametrize("layers", [HYBRID, ["block_window", "ovq", "full_attention"]], ids=str)
def test_a_padded_sequence_gives_the_losses_and_gradients_of_its_own_tokens(
    layers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_split, "PAD_TOKEN", 36)
    ids, labels = tiny_batch(TOKENS)
    ids[ids == 36] = 35
    padded, plain = tiny_model(layers), tiny_model(layers)
    split = split_on_one_rank(padded, TOKENS)
    block = padded.config.position_multiple
    inputs, padded_labels = split.inputs(ids), split.labels(labels)
    assert inputs.shape == padded_labels.shape == (2, -(-TOKENS // block) * block)

    loss, counted = token_losses(padded(inputs, split.context()), padded_labels)
    loss.backward()
    plain_loss, plain_counted = token_losses(plain(ids, WholeSequence()), labels)
    plain_loss.backward()
    assert counted == plain_counted
    assert loss.item() == pytest.approx(plain_loss.item(), rel=1e-6)
    for (name, one), other in zip(padded.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).abs().max() <= 2e-6 * other.grad.abs().max() + 1e-6, name
    assert padded.embedding.weight.grad is not None
    assert padded.embedding.weight.grad[36].eq(0).all(), "a pad has a gradient"


def test_no_token_sees_which_token_fills_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, _) = tiny_model(HYBRID), tiny_batch(TOKENS)
    logits = []
    for pad in (0, 36):
        monkeypatch.setattr(sequence_split, "PAD_TOKEN", pad)
        split = split_on_one_rank(model, TOKENS)
        logits.append(model(split.inputs(ids), split.context())[:, :TOKENS])
    assert torch.equal(*logits)


def test_a_batch_of_another_length_is_refused() -> None:
    split = split_on_one_rank(tiny_model(["kvm"]), TOKENS)
    with pytest.raises(ValueError, match="sequences of 128 tokens; this split is of 101"):
        split.inputs(torch.zeros(1, 128, dtype=torch.int64))
