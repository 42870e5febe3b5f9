"""The kernels on a GPU, where there is one: every dtype against the definition in float64."""

from typing import Any

import pytest
import torch

from models.kvm import FixedBudget, PowerLawBudget
from tests.models.kvm.cases import Case, assert_close, random_case, state_tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Of the largest entry. Halves round weights and values on their way through a product.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
SHAPES = [
    {
        "tokens": 611,
        "width": 64,
        "chunk": 64,
        "heads": 3,
        "batch": 2,
        "budget": PowerLawBudget(factor=8, minimum=64),
    },
    {"tokens": 1100, "width": 128, "chunk": 256, "budget": FixedBudget(slots=256), "gate_appends": True},
    {"tokens": 300, "width": 24, "chunk": 20, "budget": FixedBudget(slots=50), "value_radius": False},
]


def on_gpu(case: Case, dtype: torch.dtype) -> tuple[Case, Case]:
    """The case with tokens in `dtype`, and the same rounded tokens in float64."""
    rounded = {
        name: None if one is None else one.to(dtype) if name in ("q", "k", "v") else one
        for name, one in case.inputs.items()
    }
    gpu = {name: None if one is None else one.cuda() for name, one in rounded.items()}
    exact = {name: None if one is None else one.double().cuda() for name, one in rounded.items()}
    grad = case.grad_output.to(dtype).cuda()
    return Case(gpu, case.settings, grad), Case(exact, case.settings, grad.double())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_output_state_and_gradients_equal_the_definition(shape: dict[str, Any], dtype: torch.dtype) -> None:
    case, exact = on_gpu(random_case(**shape), dtype)
    got, wanted = case.run("triton"), exact.run("reference")
    tolerance = TOLERANCES[dtype]
    assert_close({"output": got.output.double()}, {"output": wanted.output}, tolerance)
    state = {name: one.double() for name, one in state_tensors(got.state).items()}
    assert_close(state, state_tensors(wanted.state), tolerance)
    gradients = {name: one.double() for name, one in got.gradients.items()}
    assert_close(gradients, wanted.gradients, 2 * tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_second_run_gives_the_same_bits(dtype: torch.dtype) -> None:
    case, _ = on_gpu(random_case(700, width=64, chunk=64, budget=FixedBudget(slots=64)), dtype)
    first, second = case.run("triton"), case.run("triton")
    assert torch.equal(first.output, second.output)
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, second.gradients[name]), name


def test_auto_takes_the_kernels() -> None:
    case, _ = on_gpu(random_case(60), torch.float32)
    assert torch.equal(case.run("auto").output, case.run("triton").output)
