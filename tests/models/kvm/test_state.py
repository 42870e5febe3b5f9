"""A sequence cut into calls gives what one call gives."""

from typing import Any

import pytest
import torch

from models.kvm import KVMState
from tests.models.kvm.cases import PARAMETERS, Case, assert_close, random_case, state_tensors

SPLITS = {
    "one token at a time": [1] * 41,
    "at chunk edges": [4, 4, 12, 21],
    "across chunk edges": [3, 2, 9, 6, 21],
    "a prefill, then tokens": [33, 1, 1, 1, 1, 1, 1, 1, 1],
    "in the middle of the first chunk": [2, 39],
    "two halves": [20, 21],
}


def run_pieces(case: Case, lengths: list[int], backend: str) -> tuple[dict[str, torch.Tensor], KVMState]:
    """Output and all gradients of a sequence given in pieces, in one graph."""
    leaves = case.leaves()
    state: KVMState | None = None
    outputs = []
    start = 0
    for length in lengths:
        piece = {
            name: leaf if name in PARAMETERS else leaf[:, start : start + length]
            for name, leaf in leaves.items()
        }
        output, state = case.call(piece, backend=backend, state=state, return_state=True)
        outputs.append(output)
        start += length
    assert state is not None
    joined = torch.cat(outputs, dim=1)
    joined.backward(case.grad_output)
    found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"output": joined.detach(), **found}, state


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("split", SPLITS)
def test_pieces_give_the_output_state_and_gradients_of_one_call(split: str, backend: str) -> None:
    case = random_case(41, batch=2, dtype=torch.float64)
    whole = case.run("reference")
    pieces, state = run_pieces(case, SPLITS[split], backend)
    assert_close(pieces, {"output": whole.output, **whole.gradients}, 1e-9)
    assert_close(state_tensors(state), state_tensors(whole.state), 1e-9)
    assert state.position == 41


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(
    "settings",
    [
        {"window_chunks": 1},
        {"window_chunks": 3},
        {"value_radius": False, "gate_first_state": True},
        {"gate": False},
        {"gate_appends": True, "sinks": 2},
    ],
)
def test_pieces_give_the_same_under_other_settings(settings: dict[str, Any], backend: str) -> None:
    case = random_case(41, dtype=torch.float64, **settings)
    whole = case.run("reference")
    pieces, state = run_pieces(case, [5, 1, 2, 17, 16], backend)
    assert_close(pieces, {"output": whole.output, **whole.gradients}, 1e-9)
    assert_close(state_tensors(state), state_tensors(whole.state), 1e-9)


def test_the_second_piece_alone_sends_gradients_to_the_first() -> None:
    case = random_case(40, dtype=torch.float64)
    leaves = case.leaves()
    first = {name: leaf if name in PARAMETERS else leaf[:, :24] for name, leaf in leaves.items()}
    second = {name: leaf if name in PARAMETERS else leaf[:, 24:] for name, leaf in leaves.items()}
    _, state = case.call(first, backend="torch", return_state=True)
    output, _ = case.call(second, backend="torch", state=state)
    output.backward(case.grad_output[:, 24:])
    whole = case.leaves()
    wanted, _ = case.call(whole, backend="reference")
    wanted[:, 24:].backward(case.grad_output[:, 24:])
    for name in ("k", "v", "merge_gate"):
        got = leaves[name].grad
        assert got is not None
        assert got[:, :16].abs().sum() > 0, f"{name}: these tokens are only in the state"
        torch.testing.assert_close(got, whole[name].grad)


def test_a_state_is_float32_for_bfloat16_tokens_and_keeps_their_window() -> None:
    case = random_case(30, dtype=torch.float32)
    leaves = {
        name: leaf.detach().bfloat16() if name not in PARAMETERS else leaf.detach()
        for name, leaf in case.leaves().items()
    }
    output, state = case.call(leaves, return_state=True)
    assert output.dtype == torch.bfloat16
    assert state is not None
    assert state.radii is not None
    assert {state.keys.dtype, state.values.dtype, state.radii.dtype} == {torch.float32}
    assert state.window_keys.dtype == torch.bfloat16


def test_a_state_does_not_keep_the_call_it_came_from_alive() -> None:
    case = random_case(400)
    _, state = case.call(case.leaves(), return_state=True)
    assert state is not None
    assert state.window_keys.untyped_storage().nbytes() == state.window_keys.nbytes
