"""Reading in pieces: the numbers of one forward, with the memory of a piece."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvm_dist.evaluate import reading
from kvm_dist.evaluate.reading import losses_and_hits, next_token_losses, piece_tokens, write_on
from models.backbone import Backbone
from models.generate import generate
from parallel.sequence.context import WholeSequence
from tests.models.tiny import tiny_batch, tiny_model

LAYERS = ["kvm", "rwkv7", "full_attention"]
TOKENS = 75  # no multiple of a chunk or a piece


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST_PIECE", 32)
    monkeypatch.setattr(reading, "_SHORTEST_PIECE", 16)


def read_lengths(model: Backbone, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the tokens of every call of the model."""
    lengths: list[int] = []
    forward = model.forward

    def counted(input_ids: Tensor, context: Any) -> Tensor:
        lengths.append(input_ids.shape[1])
        return forward(input_ids, context)

    monkeypatch.setattr(model, "forward", counted)
    return lengths


def test_losses_in_pieces_are_those_of_one_forward(
    short_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(LAYERS)
    inputs, labels = tiny_batch(TOKENS)
    with torch.no_grad():
        logits = model(inputs, WholeSequence())
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    lengths = read_lengths(model, monkeypatch)
    found, hits = losses_and_hits(model, inputs, labels)
    assert lengths == [32, 32, 11]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(hits, logits.argmax(-1) == labels)
    assert torch.equal(next_token_losses(model, inputs, labels), found)
    assert (found[labels == -100] == 0).all()


def test_the_losses_of_a_bfloat16_model_are_summed_in_float32() -> None:
    model = tiny_model(LAYERS).bfloat16()
    inputs, labels = tiny_batch(TOKENS)
    found = next_token_losses(model, inputs, labels)
    with torch.no_grad():
        logits = model(inputs, WholeSequence()).float()
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted)


def test_a_large_vocabulary_makes_pieces_short_and_whole_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(["kvm"])
    assert piece_tokens(model, rows=1) == reading.LONGEST_PIECE
    monkeypatch.setattr(reading, "_LOGITS_BYTES", 4 * model.config.vocab_size * 100)
    assert piece_tokens(model, rows=1) == 96  # KVM chunks of 16
    assert piece_tokens(model, rows=50) == reading._SHORTEST_PIECE


def test_writing_on_is_what_generate_writes_row_by_row(short_pieces: None) -> None:
    model = tiny_model(LAYERS)
    prompts, _ = tiny_batch(TOKENS, batch=3)
    written = write_on(model, prompts, 5, lambda row, ids: False)
    for row, ids in enumerate(written):
        wanted = generate(model, prompts[row], 5, 0.0, torch.Generator())
        assert ids == wanted.tolist()


def test_writing_ends_by_row_and_altogether_once_all_are_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(LAYERS)
    prompts, _ = tiny_batch(TOKENS, batch=2)
    lengths = read_lengths(model, monkeypatch)
    written = write_on(model, prompts, 50, lambda row, ids: len(ids) == (2, 4)[row])
    assert [len(ids) for ids in written] == [2, 4]
    assert lengths == [TOKENS, 1, 1, 1]
