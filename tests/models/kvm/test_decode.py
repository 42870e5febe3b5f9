"""One token at a time without gradients: the same outputs and states, with nothing normed twice."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from models.kvm import KVMState
from models.kvm.state import SlotReads
from tests.models.kvm.cases import PARAMETERS, Case, assert_close, random_case, state_tensors


def piece(leaves: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {name: leaf if name in PARAMETERS else leaf[:, start:stop] for name, leaf in leaves.items()}


def decoded(case: Case, prompt: int) -> tuple[Tensor, list[KVMState]]:
    """Outputs of a prompt and then of token after token, and the state after each call."""
    leaves = case.leaves()
    state: KVMState | None = None
    outputs, states = [], []
    edges = [0, *range(prompt, case.tokens + 1)] if prompt else list(range(case.tokens + 1))
    with torch.no_grad():
        for start, stop in pairwise(edges):
            output, state = case.call(
                piece(leaves, start, stop), backend="torch", state=state, return_state=True
            )
            assert state is not None
            outputs.append(output)
            states.append(state)
    return torch.cat(outputs, dim=1), states


@pytest.mark.parametrize("prompt", [0, 3, 21])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"window_chunks": 1},
        {"window_chunks": 3, "temperatures": False},
        {"value_radius": False},
        {"gate": False, "rotary_dims": 0},
    ],
)
def test_tokens_one_by_one_give_the_outputs_and_state_of_one_call(
    settings: dict[str, Any], prompt: int
) -> None:
    case = random_case(41, batch=2, dtype=torch.float64, **settings)
    whole = case.run("reference")
    output, states = decoded(case, prompt)
    assert_close({"output": output}, {"output": whole.output}, 1e-9)
    assert_close(state_tensors(states[-1]), state_tensors(whole.state), 1e-9)


def test_bfloat16_tokens_are_decoded_as_a_prefill_reads_them() -> None:
    case = random_case(41, batch=2)
    leaves = {name: leaf.detach().bfloat16() for name, leaf in case.leaves().items()}
    rounded = Case({**case.inputs, **leaves}, case.settings, case.grad_output)
    with torch.no_grad():
        wanted, _ = rounded.call(rounded.leaves(), backend="torch")
    output, _ = decoded(rounded, 21)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, wanted)


def test_slots_are_shared_and_normed_once_until_a_token_opens_a_block() -> None:
    case = random_case(40)  # chunks of 4 tokens
    _, states = decoded(case, 20)
    first, second, third, fourth, opened = states[1:6]  # the first and the last open a block
    assert first.reads is None
    assert first.keys is second.keys is third.keys is fourth.keys
    assert second.reads is not None
    assert second.reads is third.reads is fourth.reads
    assert opened.keys is not fourth.keys
    assert opened.reads is None


def test_two_continuations_of_one_state_do_not_disturb_each_other() -> None:
    case, other = random_case(40), random_case(40, seed=1)
    _, states = decoded(case, 20)
    start = states[3]
    before = {name: tensor.clone() for name, tensor in state_tensors(start).items()}
    with torch.no_grad():
        first, _ = case.call(piece(case.leaves(), 23, 24), state=start, return_state=True)
        changed = {**case.leaves(), **{name: other.leaves()[name] for name in ("q", "k", "v", "merge_gate")}}
        case.call(piece(changed, 23, 24), state=start, return_state=True)
        again, _ = case.call(piece(case.leaves(), 23, 24), state=start, return_state=True)
    assert torch.equal(first, again)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_tensors(start).items())


def test_a_state_of_inference_mode_goes_on_without_it() -> None:
    case = random_case(40)
    wanted, _ = decoded(case, 20)
    leaves, state, outputs = case.leaves(), None, []
    for start, stop in pairwise([0, *range(20, case.tokens + 1)]):
        given = {name: one.detach() for name, one in piece(leaves, start, stop).items()}
        with torch.inference_mode(start < 26), torch.no_grad():
            output, state = case.call(given, backend="torch", state=state, return_state=True)
        outputs.append(output.clone())
    assert torch.equal(torch.cat(outputs, dim=1), wanted)


def test_windows_grow_in_place_and_are_copied_where_two_go_on() -> None:
    case = random_case(40)  # chunks of 4 tokens, windows of 8
    _, states = decoded(case, 20)
    second, third = states[2:4]
    assert second.window_keys.data_ptr() == third.window_keys.data_ptr()
    with torch.no_grad():
        _, other = case.call(piece(case.leaves(), 22, 23), state=second, return_state=True)
    assert other is not None
    assert other.window_keys.data_ptr() != third.window_keys.data_ptr()


@pytest.mark.parametrize("name", ["key_norm_weight", "key_norm_bias"])
def test_a_norm_trained_since_the_last_token_is_applied_anew(name: str) -> None:
    case = random_case(40)
    leaves = case.leaves()
    _, states = decoded(case, 20)
    with torch.no_grad():
        _, state = case.call(piece(leaves, 22, 23), state=states[2], return_state=True)
        leaves[name] += 0.5
        got, _ = case.call(piece(leaves, 23, 24), state=state)
        assert state is not None
        bare = KVMState(**{key: value for key, value in vars(state).items() if key != "reads"})
        wanted, _ = case.call(piece(leaves, 23, 24), state=bare)
    assert torch.equal(got, wanted)


def test_a_decoded_token_sends_gradients_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(40, dtype=torch.float64)
    _, states = decoded(case, 22)
    monkeypatch.setattr(SlotReads, "fit", lambda *_: pytest.fail("the fast path has no gradients"))
    leaves = case.leaves()
    output, _ = case.call(piece(leaves, 22, 23), state=states[0])
    output.sum().backward()
    assert leaves["v"].grad is not None
    assert leaves["v"].grad[:, 22].abs().sum() > 0
