"""What `kvm_attention` refuses, in words that say how to mend it."""

from typing import Any

import pytest
import torch

from models.kvm import FixedBudget
from tests.models.kvm.cases import random_case
from tests.support.logical_ranks import queue_exchanges

TOKENS = 12


def call(inputs: dict[str, Any], more: dict[str, Any]) -> None:
    case = random_case(TOKENS)
    case.call({**case.leaves(), **inputs}, **more)


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"q": torch.zeros(1, TOKENS, 2)}, r"q has shape \[1, 12, 2\]: want \[B, T, H, D\]"),
        ({"q": torch.zeros(1, 0, 2, 8)}, "q has shape"),
        ({"k": torch.zeros(1, TOKENS, 2, 4)}, r"k has shape \[1, 12, 2, 4\]: want \[1, 12, 2, 8\]"),
        ({"merge_gate": torch.zeros(1, 2, TOKENS)}, r"merge_gate has shape \[1, 2, 12\]: want \[1, 12, 2\]"),
        ({"key_norm_weight": torch.ones(2)}, "key_norm_weight has shape"),
        ({"state_temperature": torch.ones(8)}, "state_temperature has shape"),
        ({"v": torch.zeros(1, TOKENS, 2, 8, dtype=torch.float64)}, "want one dtype"),
        ({"merge_gate": torch.ones(1, TOKENS, 2, dtype=torch.int64)}, "merge_gate has dtype"),
        ({"k": torch.zeros(1, TOKENS, 2, 8, device="meta")}, "k is on meta"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(inputs: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call(inputs, {})


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"rotary_dims": 8}, "rotary_dims=8"),
        ({"budget": FixedBudget(slots=3)}, "budget.slots=3"),
        ({"sinks": 4}, "sinks=4"),
        ({"backend": "triton"}, "want tensors on a GPU"),
        ({"backend": "fast"}, "backend='fast'"),
        ({"start": 4}, "start=4"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(more: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call({}, more)


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="chunks"):
        call({}, {"chunks": 4})


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"chunk": 8}, "state.keys has shape|state.window_keys has shape"),
        ({"window_chunks": 3}, "state.window_keys has shape"),
        ({"value_radius": False}, "state holds radii"),
        ({"merge_gate": None}, "merge_gate"),
        ({"start": 5}, "start=5"),
    ],
)
def test_a_state_made_under_other_settings_is_refused(more: dict[str, Any], named: str) -> None:
    case = random_case(30)
    _, state = case.call(case.leaves(), return_state=True)
    with pytest.raises(ValueError, match=named):
        case.call(case.leaves(), state=state, **more)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_no_state_is_returned_unless_asked_for(backend: str) -> None:
    case = random_case(30)
    assert case.call(case.leaves(), backend=backend)[1] is None


def test_shards_that_do_not_fit_are_refused() -> None:
    case = random_case(10)
    first, second = queue_exchanges(2)
    for exchange, more, named in (
        (first, {}, "ends inside a chunk"),
        (second, {"start": 0}, "begins at a multiple"),
        (second, {"start": 6}, "begins at a multiple"),
        (second, {"start": 4, "backend": "reference"}, "backend='reference'"),
    ):
        with pytest.raises(ValueError, match=named):
            case.call(case.leaves(), exchange=exchange, **more)
    aligned = random_case(8)
    with pytest.raises(ValueError, match="return_state"):
        aligned.call(aligned.leaves(), exchange=first, return_state=True)


def test_autocast_changes_no_bit() -> None:
    """Mixed precision would round the similarities, and routing does not survive that."""
    case = random_case(60)
    plain = case.run("torch")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = case.run("torch")
    assert torch.equal(plain.output, mixed.output)
    for name, gradient in plain.gradients.items():
        assert torch.equal(gradient, mixed.gradients[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_tokens_are_summed_in_float32(dtype: torch.dtype) -> None:
    case = random_case(60)
    rounded = case.with_inputs(
        **{name: tensor.to(dtype).float() for name, tensor in case.inputs.items() if tensor is not None}
    )
    wanted = rounded.run("reference")
    leaves = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in case.leaves().items()}
    output, _ = case.call(leaves)
    output.backward(case.grad_output.to(dtype))
    torch.testing.assert_close(output, wanted.output.to(dtype))
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert leaf.grad.dtype == dtype
        scale = wanted.gradients[name].abs().max()
        assert (leaf.grad.float() - wanted.gradients[name]).abs().max() < 0.02 * scale, name
