"""A loss that forms the logits of some tokens at a time is the same loss, and needs little memory."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvm_dist.config import DataConfig, RunConfig, TrainConfig
from kvm_dist.load import load_config
from kvm_dist.plan import make_plan
from models.backbone import Backbone
from models.loss import token_losses
from parallel.sequence.context import WholeSequence
from tests.models.tiny import tiny_batch, tiny_model
from tests.support.saved_bytes import saved_bytes

TOKENS, SEQUENCES = 203, 2
CONFIGS = Path(__file__).parents[2] / "configs"


def gradients(model: Backbone, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("chunk", [1, 7, TOKENS, SEQUENCES * TOKENS, 10**6])
def test_chunks_of_any_size_give_the_loss_and_the_gradients_of_the_whole(chunk: int) -> None:
    model = tiny_model(["kvm", "rwkv7"])
    ids, labels = tiny_batch(TOKENS, SEQUENCES)
    labels[0, 11:50] = -100
    whole = token_losses(model(ids, WholeSequence()), labels)[0]
    wanted = gradients(model, whole)
    cut = model(ids, WholeSequence(), labels, chunk)
    assert cut.shape == ()
    assert cut.item() == pytest.approx(whole.item(), rel=1e-6)
    found = gradients(model, cut)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())), name


def test_nothing_is_computed_again_where_there_is_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = tiny_model(["kvm"]), []

    def counted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return token_losses(logits, labels)

    monkeypatch.setattr("models.head.token_losses", counted)
    ids, labels = tiny_batch(TOKENS, 1)
    with torch.no_grad():
        model(ids, WholeSequence(), labels, 50)
    assert len(calls) == 5
    model(ids, WholeSequence(), labels, 50).backward()
    assert len(calls) == 3 * 5


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_kept_for_the_backward_is_planned(precision: str) -> None:
    sizes = {"hidden_size": 96, "num_heads": 3, "head_dim": 32, "base_width": 96, "vocab_size": 4096}
    model = tiny_model(["kvm", "rwkv7"], **sizes)
    model.to(getattr(torch, precision))
    ids, labels = tiny_batch(TOKENS, SEQUENCES)
    plans = {}
    for chunk in (None, 16):
        config = RunConfig.model_validate(
            {
                "model": model.config,
                "data": DataConfig(sequence_length=TOKENS),
                "parallel": {"precision": precision},
                "train": TrainConfig(batch_sequences=SEQUENCES, loss_chunk=chunk),
            }
        )
        plans[chunk] = make_plan(config)
        with saved_bytes(model.parameters()) as saved:
            if chunk is None:
                loss = token_losses(model(ids, WholeSequence()), labels)[0]
            else:
                loss = model(ids, WholeSequence(), labels, chunk)
        assert plans[chunk].memory.activations == pytest.approx(saved.total, rel=0.15)
        loss.backward()
    assert plans[16].memory.working < plans[None].memory.working / 10
    again = plans[16].train_flops_per_token - plans[None].train_flops_per_token
    assert again == 2 * model.config.hidden_size * model.config.vocab_size


def test_a_million_tokens_fit_on_eight_gpus_by_chunks() -> None:
    path = CONFIGS / "prolong/350M/kvm-sqrt.yaml"
    long = ["data.sequence_length=1048576", "train.batch_sequences=1", "train.accumulation=1"]
    long += ["parallel.data=1", "parallel.sequence=8", "model.activation_checkpointing=true"]
    whole, cut = (
        make_plan(load_config(path, [*long, f"train.loss_chunk={chunk}"]).config).memory.total
        for chunk in ("null", 4096)
    )
    assert cut < 141e9 < whole
