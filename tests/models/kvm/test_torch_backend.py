"""The one-Function backend against the definition: outputs, states and every gradient."""

from typing import Any

import pytest
import torch

from models.kvm import FixedBudget, SaturatingBudget
from models.kvm.softmax_part import (
    softmax_part,
    softmax_part_backward,
    softmax_part_backward_by_matmul,
    softmax_part_by_matmul,
)
from tests.models.kvm.cases import Case, assert_close, random_case, state_tensors

C, L = 4, 8  # chunk and window of the random cases


def assert_backends_agree(case: Case, tolerance: float = 1e-9) -> None:
    wanted, got = case.run("reference"), case.run("torch")
    assert_close({"output": got.output}, {"output": wanted.output}, tolerance)
    assert_close(state_tensors(got.state), state_tensors(wanted.state), tolerance)
    assert got.state.position == wanted.state.position
    assert_close(got.gradients, wanted.gradients, tolerance)


@pytest.mark.parametrize("tokens", [1, 2, 3, C - 1, C, C + 1, L - 1, L, L + 1, L + C, L + C + 1, 61])
def test_backends_agree_at_every_edge_of_chunk_and_window(tokens: int) -> None:
    assert_backends_agree(random_case(tokens, batch=2, dtype=torch.float64))


@pytest.mark.parametrize("window_chunks", [1, 2, 3, 5])
@pytest.mark.parametrize("tokens", [27, 60])
def test_backends_agree_for_every_window(window_chunks: int, tokens: int) -> None:
    assert_backends_agree(random_case(tokens, window_chunks=window_chunks, dtype=torch.float64))


SWITCHES: dict[str, dict[str, Any]] = {
    "no sinks": {"sinks": 0},
    "all slots but one are sinks": {"sinks": C - 1},
    "no gate": {"gate": False},
    "no gate, gated appends": {"gate": False, "gate_appends": True},
    "no temperatures": {"temperatures": False},
    "gated appends": {"gate_appends": True},
    "gated first state": {"gate_first_state": True},
    "both gated": {"gate_first_state": True, "gate_appends": True},
    "no radius": {"value_radius": False},
    "no radius, both gated": {"value_radius": False, "gate_first_state": True, "gate_appends": True},
    "no rotary": {"rotary_dims": 0},
    "all rotary but one": {"rotary_dims": 7},
    "fixed": {"budget": FixedBudget(slots=9)},
    "saturating": {"budget": SaturatingBudget(limit=16)},
    "few slots": {"max_slots": 7},
    "append all": {"budget": FixedBudget(slots=1000)},
    "chunk of one token": {"chunk": 1, "sinks": 0},
    "odd width": {"width": 5},
    "three heads, two rows": {"heads": 3, "batch": 2},
    "all ablations": {
        "sinks": 0,
        "gate": False,
        "temperatures": False,
        "value_radius": False,
        "rotary_dims": 0,
        "window_chunks": 1,
    },
    "all switches": {
        "sinks": 2,
        "gate_appends": True,
        "gate_first_state": True,
        "value_radius": False,
        "rotary_dims": 5,
        "window_chunks": 3,
        "max_slots": 11,
        "budget": SaturatingBudget(limit=16),
    },
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_backends_agree_under_every_switch(switch: str) -> None:
    assert_backends_agree(random_case(50, dtype=torch.float64, **SWITCHES[switch]))


def test_backends_agree_where_the_norm_changes_no_scale() -> None:
    case = random_case(50, dtype=torch.float64)
    width = case.grad_output.shape[-1]
    ones, zeros = torch.ones(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    assert_backends_agree(case.with_inputs(key_norm_weight=ones, key_norm_bias=zeros))


def test_float32_gradients_are_those_of_float64() -> None:
    case = random_case(200, batch=2, width=16, chunk=16, seed=3)
    exact = random_case(200, batch=2, width=16, chunk=16, seed=3)
    exact.inputs = {name: None if t is None else t.double() for name, t in case.inputs.items()}
    exact.grad_output = case.grad_output.double()
    wanted, got = exact.run("reference"), case.run("torch")
    assert_close({"output": got.output.double()}, {"output": wanted.output}, 1e-5)
    assert_close({name: grad.double() for name, grad in got.gradients.items()}, wanted.gradients, 2e-5)


@pytest.mark.parametrize("settings", [{}, {"gate_appends": True}, {"value_radius": False}])
def test_gradients_equal_finite_differences(settings: dict[str, Any]) -> None:
    case = random_case(14, heads=1, width=4, dtype=torch.float64, seed=1, **settings)
    leaves = case.leaves()

    def outputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, state = case.call(dict(zip(leaves, tensors, strict=True)), backend="torch", return_state=True)
        assert state is not None
        return output, state.keys, state.values, *(() if state.radii is None else (state.radii,))

    assert torch.autograd.gradcheck(outputs, tuple(leaves.values()), eps=1e-7, atol=1e-5)


def test_zero_values_give_finite_gradients_equal_to_the_definition() -> None:
    case = random_case(40, dtype=torch.float64)
    values = case.inputs["v"]
    assert values is not None
    values[:, ::3] = 0
    assert_backends_agree(case)


def test_one_set_of_inputs_used_twice_in_a_step_gets_both_gradients() -> None:
    case = random_case(37, dtype=torch.float64)
    once = case.run("torch").gradients
    leaves = case.leaves()
    first, _ = case.call(leaves, backend="torch")
    second, _ = case.call(leaves, backend="torch")
    (first + 2 * second).backward(case.grad_output)
    assert_close(
        {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
        {name: 3 * grad for name, grad in once.items()},
        1e-9,
    )


def test_only_the_gradients_asked_for_are_returned() -> None:
    case = random_case(30)
    leaves = {name: leaf.requires_grad_(name == "v") for name, leaf in case.leaves().items()}
    output, _ = case.call(leaves, backend="torch")
    output.backward(case.grad_output)
    wanted = case.run("torch").gradients["v"]
    assert leaves["v"].grad is not None
    assert torch.equal(leaves["v"].grad, wanted)
    assert all(leaf.grad is None for name, leaf in leaves.items() if name != "v")


def test_an_expanded_gradient_and_strided_inputs_are_read_right() -> None:
    case = random_case(30, batch=2, dtype=torch.float64)
    wanted = case.run("reference")
    leaves = case.leaves()
    strided = {
        name: leaf.transpose(1, 3).contiguous().transpose(1, 3) if leaf.dim() == 4 else leaf
        for name, leaf in leaves.items()
    }
    output, _ = case.call(strided, backend="torch")
    assert_close({"output": output.detach()}, {"output": wanted.output}, 1e-9)
    output.sum().backward()
    ones = Case(case.inputs, case.settings, torch.ones_like(case.grad_output)).run("reference")
    assert_close(
        {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}, ones.gradients, 1e-9
    )


@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_matmul_equals_the_fused_kernel(causal: bool) -> None:
    q, k, v, grad = (torch.randn(2, 3, 5, 8, dtype=torch.float64) for _ in range(4))
    output, log_sum = softmax_part(q, k, v, causal)
    by_matmul = softmax_part_by_matmul(q, k, v, causal)
    torch.testing.assert_close(by_matmul, (output, log_sum))
    shifted = log_sum + 0.3  # as when other parts hold more of the softmax
    torch.testing.assert_close(
        softmax_part_backward_by_matmul(grad, q, k, v, output, shifted, causal),
        softmax_part_backward(grad, q, k, v, output, shifted, causal),
    )
