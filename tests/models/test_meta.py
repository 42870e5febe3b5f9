"""Models of shapes without numbers: what counts FLOPs and plans memory runs them on the meta device."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.backbone import Backbone
from models.cache import CachedSequence
from models.hf import KVMDistCache, KVMDistForCausalLM
from models.loss import token_losses
from parallel.sequence.context import WholeSequence
from tests.models.hf.faces import face
from tests.models.tiny import (
    HYBRID,
    RECURRENCES,
    SIMPLER_RECURRENCES,
    tiny_batch,
    tiny_config,
    tiny_model,
)


def on_meta(layers: list[str]) -> Backbone:
    with torch.device("meta"):
        return Backbone(tiny_config(layers))


@pytest.mark.parametrize("kind", tiny_config(HYBRID).known_kinds())
def test_a_layer_of_every_kind_trains_on_meta(kind: str) -> None:
    model, (ids, labels) = on_meta([kind]), tiny_batch(75)
    logits = model(ids.to("meta"), WholeSequence())
    total, _ = token_losses(logits, labels.to("meta"))
    total.backward()

    assert (logits.shape, logits.is_meta) == ((2, 75, 37), True)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.is_meta, name


@pytest.mark.parametrize("kind", [*RECURRENCES, *SIMPLER_RECURRENCES, "rwkv7", "kvm", "full_attention"])
def test_flops_are_counted_on_meta(kind: str) -> None:
    flops = []
    for model, device in ((on_meta([kind]), "meta"), (tiny_model([kind]), "cpu")):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(tiny_batch(75)[0].to(device), WholeSequence())
        flops.append(counter.get_total_flops())

    fused = kind in ("kvm", "full_attention")  # the CPU's kernel is, and torch does not count it
    assert flops[0] > flops[1] if fused else flops[0] == flops[1]


def test_a_sequence_goes_on_after_its_cache_on_meta() -> None:
    model, context = on_meta(HYBRID), CachedSequence()
    shapes = []
    with torch.no_grad():
        for tokens in (75, 1, 1, 20):
            ids = torch.zeros(2, tokens, dtype=torch.int64, device="meta")
            shapes.append(tuple(model(ids, context).shape))
            context.advance(tokens)

    assert shapes == [(2, tokens, 37) for tokens in (75, 1, 1, 20)]


def test_the_hugging_face_model_runs_on_meta() -> None:
    config = face("kvm/rwkv7").config
    with torch.device("meta"):
        model = KVMDistForCausalLM(config)
    ids = tiny_batch(40)[0].to("meta")
    trained = model.train()(ids, labels=ids)
    trained.loss.backward()
    read = model.eval()(ids)
    after = model(ids[:, :1], cache=read.cache)

    assert isinstance(read.cache, KVMDistCache)
    assert [tuple(one.logits.shape) for one in (trained, read, after)] == [
        (2, 40, 37),
        (2, 40, 37),
        (2, 1, 37),
    ]
