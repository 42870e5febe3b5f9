"""Held-out losses by chunks of the head: the same numbers, in no more memory than a step needs."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from kvm_dist.config import DataConfig, RunConfig, TrainConfig
from kvm_dist.data.loader import MicroBatch
from kvm_dist.evaluate.validation import LOSS_CHUNK, POSITION_BLOCKS, validate
from kvm_dist.plan import make_plan
from models.backbone import Backbone
from models.loss import token_losses
from parallel.sequence.context import WholeSequence
from tests.models.tiny import tiny_batch, tiny_model
from tests.support.live_bytes import LiveBytes
from tests.support.one_rank import whole_sequences

VOCABULARY = 4096
TOKENS = 1536  # more than a chunk


def model_of_many_words() -> Backbone:
    return tiny_model(["kvm", "rwkv7"], vocab_size=VOCABULARY)


@pytest.mark.parametrize("chunk", [None, 96, 1000, 10**6])
def test_losses_by_position_are_those_of_all_logits(chunk: int | None) -> None:
    model, batch = model_of_many_words(), MicroBatch(*tiny_batch(TOKENS))
    found = validate(model, [batch], whole_sequences(model.config, TOKENS), chunk)
    with torch.no_grad():
        logits = model(batch.inputs, WholeSequence())
    losses = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none").double()
    valid = batch.labels != -100
    by_block = losses.view_as(batch.labels).sum(0).view(POSITION_BLOCKS, -1).sum(1)
    wanted = by_block / valid.sum(0).view(POSITION_BLOCKS, -1).sum(1)
    assert found.position_losses == pytest.approx(wanted.tolist(), rel=1e-6)
    assert found.loss == pytest.approx(float(losses.sum() / valid.sum()), rel=1e-6)
    assert found.tokens == int(valid.sum())


@pytest.mark.parametrize("chunk", [None, 96])
def test_validating_needs_no_more_memory_than_a_step_and_than_is_planned(chunk: int | None) -> None:
    model, batch = model_of_many_words(), MicroBatch(*tiny_batch(TOKENS, 1))
    split = whole_sequences(model.config, TOKENS)
    with LiveBytes() as validating:
        validate(model, [batch], split, chunk)
    with LiveBytes() as stepping:
        if chunk is None:
            token_losses(model(batch.inputs, WholeSequence()), batch.labels)[0].backward()
        else:
            model(batch.inputs, WholeSequence(), batch.labels, chunk).backward()
    assert 0 < validating.peak < stepping.peak

    two_of_a_chunk = 2 * 4 * VOCABULARY * (chunk or LOSS_CHUNK)  # logits, and their logarithms
    rest = 4 * TOKENS * model.config.hidden_size * 40
    assert validating.peak < two_of_a_chunk + rest < 2 * 4 * VOCABULARY * TOKENS
    memory = make_plan(
        RunConfig(
            model=model.config,
            data=DataConfig(sequence_length=TOKENS),
            train=TrainConfig(batch_sequences=1, loss_chunk=chunk),
        )
    ).memory
    assert validating.peak < memory.activations + memory.working
