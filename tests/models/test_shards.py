"""Layers on shards of a sequence against one rank: real messages between threads."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from models.backbone import Backbone
from models.budget import FixedBudget, PowerLawBudget, SaturatingBudget
from models.config import BlockWindowConfig, KVMConfig
from models.loss import token_losses
from parallel.sequence.context import WholeSequence
from tests.models.shards import run_on_shards
from tests.models.tiny import HYBRID, RECURRENCES, SIMPLER_RECURRENCES, tiny_batch, tiny_model

PATTERNS = [
    ["kvm"],
    ["rwkv7"],
    ["sliding_window"],
    ["block_window"],
    ["ovq"],
    ["rwkv7", "sliding_window"],
    HYBRID,
    *([kind] for kind in RECURRENCES),
    ["kvm", *RECURRENCES],
    SIMPLER_RECURRENCES,
]
CUTS = [[32], [32, 96], [64, 96, 128]]
KVM = partial(KVMConfig, chunk=16)
SETTINGS: dict[str, dict[str, Any]] = {
    "kvm of fixed slots": {"kvm": KVM(budget=FixedBudget(slots=24))},
    "kvm that saturates": {"kvm": KVM(budget=SaturatingBudget(limit=60, minimum=16))},
    "kvm of a window of four chunks": {"kvm": KVM(window_chunks=4, budget=PowerLawBudget(minimum=16))},
    "kvm of counts, no gate": {"kvm": KVM(value_radius=False, merge_gate=False, sinks=0)},
    "rwkv7": {},
    "ovq": {},
    **{kind: {} for kind in RECURRENCES},
    "sliding_window": {},
    "block_window of six blocks": {"block_window": BlockWindowConfig(chunk=8, window_chunks=6, sinks=2)},
    "full_attention by heads": {"num_heads": 8, "head_dim": 4},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the logical ranks have: products are rounded otherwise where threads share them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def on_one_rank(model: Backbone, ids: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(ids, WholeSequence())
    token_losses(logits, labels)[0].backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients


def assert_sums(parts: dict[str, list[Tensor]], wholes: dict[str, Tensor]) -> None:
    """Gradients of parameters are sums over ranks: equal but for rounding."""
    for name, whole in wholes.items():
        assert (sum(parts[name]) - whole).abs().max() <= 2e-6 * whole.abs().max() + 1e-6, name


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("layers", PATTERNS, ids=str)
def test_shards_give_the_bits_and_the_gradients_of_one_rank(layers: list[str], cuts: list[int]) -> None:
    model = tiny_model(layers)
    ids, labels = tiny_batch(149)
    logits, gradients, _ = run_on_shards(model, ids, labels, cuts)
    expected, expected_gradients = on_one_rank(model, ids, labels)

    assert torch.equal(logits, expected)
    assert_sums(gradients, expected_gradients)


@pytest.mark.parametrize("kind", SETTINGS)
def test_eight_shards_of_one_block_give_the_bits_and_the_gradients_of_one_rank(kind: str) -> None:
    layers = [kind.split()[0]] * 2
    model = tiny_model(layers, **SETTINGS[kind])
    block = max(model.config.position_multiple, 8)  # projections of a row or two round in their own way
    ids, labels = tiny_batch(7 * block + 5)
    logits, gradients, _ = run_on_shards(model, ids, labels, [block * rank for rank in range(1, 8)])
    expected, expected_gradients = on_one_rank(model, ids, labels)

    assert torch.equal(logits, expected)
    assert_sums(gradients, expected_gradients)


@pytest.mark.parametrize("kind", SETTINGS)
def test_shards_in_bfloat16_give_the_bits_of_one_rank(kind: str) -> None:
    model = tiny_model([kind.split()[0]], **SETTINGS[kind]).bfloat16()
    ids, labels = tiny_batch(149)
    logits, _, _ = run_on_shards(model, ids, labels, [64, 96, 128])
    with torch.no_grad():
        assert torch.equal(logits, model(ids, WholeSequence()))


@pytest.mark.parametrize("cuts", [[32], [1, 99], [16, 17, 64, 90, 100, 140, 148]], ids=str)
def test_a_chain_of_full_attention_gives_the_logits_and_gradients_of_one_rank(cuts: list[int]) -> None:
    model = tiny_model(["full_attention"] * 2, num_heads=5, head_dim=8)
    ids, labels = tiny_batch(149)
    logits, gradients, _ = run_on_shards(model, ids, labels, cuts)
    expected, expected_gradients = on_one_rank(model, ids, labels)

    assert (logits - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert_sums(gradients, expected_gradients)


@pytest.mark.parametrize("layers", [*PATTERNS, ["full_attention"]], ids=str)
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
