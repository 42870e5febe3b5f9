"""A KVM layer with fewer key-value heads: its parameters, costs, messages, cache and settings."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from kvm_dist.config import RunConfig
from models.backbone import Backbone
from models.budget import PowerLawBudget
from models.cache import CachedSequence, read
from models.config import KVMConfig
from models.costs import model_costs
from models.node_messages import node_messages
from parallel.sequence.context import WholeSequence
from tests.models.test_messages import assert_as_listed
from tests.models.tiny import tiny_batch, tiny_config, tiny_model

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def settings(kv_heads: int | None) -> dict[str, Any]:
    kvm = KVMConfig(chunk=16, budget=PowerLawBudget(factor=3, minimum=16), kv_heads=kv_heads)
    return {"num_heads": HEADS, "kvm": kvm}


def grouped_model() -> Backbone:
    return tiny_model(["kvm", "kvm"], **settings(KV_HEADS))


def with_repeated_heads(model: Backbone) -> Backbone:
    """The model that has a head of keys, values, gate and state for every query head."""
    wide = Backbone(tiny_config(["kvm", "kvm"], **settings(None)))
    state = model.state_dict()
    for name, wanted in wide.state_dict().items():
        held = state[name]
        if held.shape != wanted.shape:  # rows by head, whether a head has one or `WIDTH`
            by_head = held.unflatten(0, (KV_HEADS, -1))
            state[name] = by_head.repeat_interleave(HEADS // KV_HEADS, dim=0).flatten(0, 1)
    wide.load_state_dict(state)
    return wide


def test_a_layer_computes_what_one_with_repeated_heads_does() -> None:
    model, ids = grouped_model(), tiny_batch(75)[0]
    wide = with_repeated_heads(model)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert shapes["layers.1.mixer.projections.key.weight"] == (KV_HEADS * WIDTH, 32)
    assert shapes["layers.1.mixer.gate.weight"] == (KV_HEADS, 32)
    with torch.no_grad():
        found, wanted = model(ids, WholeSequence()), wide(ids, WholeSequence())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("value_residual", [True, False])
def test_parameters_are_counted_exactly(value_residual: bool) -> None:
    config = tiny_config(["kvm", "kvm"], value_residual=value_residual, **settings(KV_HEADS))
    assert model_costs(config, 128).parameters == sum(p.numel() for p in Backbone(config).parameters())


@pytest.mark.parametrize("tokens", [40, 101])
def test_every_byte_kept_for_decoding_is_counted(tokens: int) -> None:
    def of(entry: object) -> int:
        values = entry if isinstance(entry, tuple) else vars(entry).values()
        return sum(one.nbytes for one in values if isinstance(one, Tensor))

    model, cache = grouped_model(), CachedSequence()
    with torch.no_grad():
        read(model, tiny_batch(tokens, batch=1)[0], cache)
    planned = model_costs(model.config, tokens)
    assert planned.decode_state_bytes == sum(of(entry) for entry in cache._entries.values())
    full = model_costs(tiny_config(["kvm", "kvm"], **settings(None)), tokens)
    assert planned.decode_state_bytes < 0.6 * full.decode_state_bytes
    assert planned.saved_token_bytes < full.saved_token_bytes


@pytest.mark.parametrize("head_groups", [1, 2])
def test_ranks_send_what_is_listed(head_groups: int) -> None:
    assert_as_listed(grouped_model(), [0, 32, 128, 149], head_groups=head_groups)


def test_nodes_send_what_shrinks_by_the_group() -> None:
    spans = [(0, 32), (32, 80), (80, 112), (112, 149)]

    def listed(kv_heads: int | None) -> list[tuple[int, str, int]]:
        messages = node_messages(tiny_config(["kvm"], **settings(kv_heads)), spans, 2, 1)
        return [(one.to, one.message.name, one.message.size(4)) for one in messages]

    assert [(to, name, 2 * size) for to, name, size in listed(KV_HEADS)] == listed(None)


def test_pieces_give_what_one_call_gives() -> None:
    model, ids = grouped_model().double(), tiny_batch(60)[0]
    cache = CachedSequence()
    with torch.no_grad():
        pieces = [read(model, piece, cache) for piece in ids.split([33, 1, 1, 20, 1, 4], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids, WholeSequence()))


def test_heads_that_do_not_divide_and_too_many_groups_are_refused_by_key() -> None:
    with pytest.raises(ValidationError, match=r"model.kvm.kv_heads=3 does not divide model.num_heads=4"):
        tiny_config(["kvm"], **settings(3))
    parallel = {"sequence": 2, "head_groups": 3}
    model = tiny_config(["kvm"], **settings(KV_HEADS)).model_dump()
    with pytest.raises(ValidationError, match=r"head_groups=3 is more than model.kvm.kv_heads=2"):
        RunConfig.model_validate({"model": model, "parallel": parallel})
