import pytest
import torch

from tests.models.kvm import golden

TOLERANCE = 1e-5
HALF = "op_fixed"  # the interpreter takes its time


@pytest.mark.parametrize("name", golden.NAMES)
def test_output_gradients_and_final_state_equal_the_published_vectors(name: str) -> None:
    case = golden.load(name)
    output, state = case.run("triton")
    output.backward(case.grad_output)
    assert golden.relative_error(output, case.output) < TOLERANCE
    for key, wanted in case.final_state.items():
        assert getattr(state, key).shape == wanted.shape
        assert golden.relative_error(getattr(state, key), wanted) < TOLERANCE, key
    for key, wanted in case.gradients.items():
        grad = case.inputs[key].grad
        got = torch.zeros_like(wanted) if grad is None else grad  # short sequences never use the gate
        assert golden.relative_error(got, wanted) < TOLERANCE, key


def test_half_precision_tokens_stay_near_a_published_vector() -> None:
    case = golden.load(HALF)
    for token in ("q", "k", "v"):
        case.inputs[token] = case.inputs[token].detach().half().requires_grad_()
    output, _ = case.run("triton")
    output.backward(case.grad_output.half())
    assert golden.relative_error(output.float(), case.output) < 5e-3
    for key, wanted in case.gradients.items():
        assert golden.relative_error(case.inputs[key].grad.float(), wanted) < 1e-2, key
