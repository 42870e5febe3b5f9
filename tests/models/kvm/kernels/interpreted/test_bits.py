"""What must not change a single bit: another run, what unset memory holds, and how work is cut to pieces."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.kvm.kernels import advance, attend, gradients
from tests.models.kvm.cases import Case, Result, random_case, state_tensors


def assert_same_bits(got: Result, wanted: Result) -> None:
    assert torch.equal(got.output, wanted.output)
    for name, one in state_tensors(wanted.state).items():
        assert torch.equal(getattr(got.state, name), one), name
    for name, one in wanted.gradients.items():
        assert torch.equal(got.gradients[name], one), name


def case() -> Case:
    return random_case(22, width=12, seed=2, gate_appends=True)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody set holds NaN, or a large integer."""

    def fill(tensor: Tensor) -> Tensor:
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 0x0FFFFFF)

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        original = getattr(owner, name)

        def poisoned(*arguments: Any, original: Any = original, **more: Any) -> Tensor:
            return fill(original(*arguments, **more))

        monkeypatch.setattr(owner, name, poisoned)


def test_a_second_run_gives_the_same_bits_whatever_unset_memory_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = case().run("triton")
    poison(monkeypatch)
    assert_same_bits(case().run("triton"), wanted)


def test_states_cut_to_small_pieces_change_no_bit_but_those_of_parameter_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = case().run("triton")
    monkeypatch.setattr(advance, "PREPARED_BYTES", 1)
    monkeypatch.setattr(attend, "STATES_BYTES", 1)
    monkeypatch.setattr(gradients, "STATES_BYTES", 1)
    got = case().run("triton")
    for name in ("key_norm_weight", "key_norm_bias", "state_temperature", "window_temperature"):
        torch.testing.assert_close(got.gradients.pop(name), wanted.gradients.pop(name))
    assert_same_bits(got, wanted)


def test_some_heads_alone_give_the_bits_that_they_give_among_all() -> None:
    """As sequence parallelism calls the operator on groups of heads."""
    whole = random_case(17, heads=2, width=12, seed=4, gate_appends=True)
    wanted, group = whole.run("triton"), slice(1, 2)
    heads_at = dict.fromkeys(("q", "k", "v", "merge_gate"), 2)
    heads_at |= dict.fromkeys(("state_temperature", "window_temperature"), 0)

    def of_group(tensors: dict[str, Any]) -> dict[str, Any]:
        places = {name: (slice(None),) * axis + (group,) for name, axis in heads_at.items()}
        return {name: one[places[name]] if name in places else one for name, one in tensors.items()}

    alone = Case(of_group(whole.inputs), whole.settings, whole.grad_output[:, :, group]).run("triton")
    assert torch.equal(alone.output, wanted.output[:, :, group])
    for name, one in state_tensors(wanted.state).items():
        axis = 2 if name.startswith("window") else 1
        assert torch.equal(getattr(alone.state, name), one[(slice(None),) * axis + (group,)]), name
    gradients = of_group(wanted.gradients)
    for name in heads_at:
        assert torch.equal(alone.gradients[name], gradients[name]), name
