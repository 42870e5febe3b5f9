"""Comparing the kernels with the definition in float64, on the same rounded inputs."""

import torch
from torch import Tensor

from tests.models.kvm.cases import Case, Result, assert_close, state_tensors


def exactly(case: Case) -> Result:
    """The definition in float64."""
    inputs = {name: None if one is None else one.double() for name, one in case.inputs.items()}
    return Case(inputs, case.settings, case.grad_output.double()).run("reference")


def rounded(case: Case, dtype: torch.dtype) -> Case:
    """The case with tokens in `dtype`; parameters stay float32, as layers keep them."""
    if dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter multiplies bfloat16 wrongly: only a GPU can test it")
    tokens = {name: case.inputs[name] for name in ("q", "k", "v")}
    changed = {name: None if one is None else one.to(dtype) for name, one in tokens.items()}
    return Case({**case.inputs, **changed}, case.settings, case.grad_output.to(dtype))


def doubled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.double() for name, one in tensors.items()}


def assert_is_exact(case: Case, output: float = 1e-5, gradient: float = 2e-5) -> None:
    """Output, state and every gradient within a tolerance of the largest entry wanted."""
    wanted, got = exactly(case), case.run("triton")
    assert got.state.position == wanted.state.position
    assert_close({"output": got.output.double()}, {"output": wanted.output}, output)
    assert_close(doubled(state_tensors(got.state)), state_tensors(wanted.state), output)
    assert_close(doubled(got.gradients), wanted.gradients, gradient)
