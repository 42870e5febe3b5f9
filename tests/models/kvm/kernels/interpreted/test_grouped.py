"""Several query heads on one head of keys, values and state, in kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.kvm import KVMState
from models.kvm.kernels import attend, gradients
from parallel.sequence.context import HeadSplit
from tests.models.kvm.cases import PARAMETERS, assert_close, random_case, state_tensors
from tests.models.kvm.cases import gradients as gradients_of
from tests.models.kvm.kernels.interpreted.exact import assert_is_exact
from tests.support.logical_ranks import QueueExchange, run_logical_ranks


def test_states_of_one_row_at_a_time_give_what_the_definition_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "STATES_BYTES", 1)
    monkeypatch.setattr(gradients, "STATES_BYTES", 1)
    assert_is_exact(random_case(13, heads=2, group=2, gate_appends=True))


def test_three_queries_on_one_key_without_gate_radius_and_temperatures() -> None:
    settings: dict[str, Any] = {"value_radius": False, "gate": False, "temperatures": False}
    assert_is_exact(random_case(13, heads=1, group=3, **settings))


def test_token_by_token_gives_the_output_and_state_of_one_call() -> None:
    case = random_case(10, heads=1, group=2)
    wanted, leaves = case.run("reference"), case.leaves()
    state: KVMState | None = None
    outputs = []
    with torch.no_grad():
        for at in range(10):
            piece = {name: one if name in PARAMETERS else one[:, at : at + 1] for name, one in leaves.items()}
            output, state = case.call(piece, backend="triton", state=state, return_state=True)
            outputs.append(output)
    assert state is not None
    assert_close({"output": torch.cat(outputs, dim=1)}, {"output": wanted.output}, 1e-5)
    assert_close(state_tensors(state), state_tensors(wanted.state), 1e-5)


def test_ranks_that_hand_over_by_heads_give_the_bits_of_one_rank() -> None:
    case = random_case(13, heads=2, group=2, gate_appends=True)
    one, spans = case.run("triton"), ((0, 8), (8, 13))

    def shard(rank: int, exchange: QueueExchange) -> dict[str, Tensor]:
        start, stop = spans[rank]
        leaves, split = case.leaves(start, stop), HeadSplit(2)
        output, _ = case.call(leaves, exchange=exchange, start=start, backend="triton", head_split=split)
        output.backward(case.grad_output[:, start:stop])
        return {"output": output.detach(), **gradients_of(leaves)}

    parts = run_logical_ranks(2, shard, timeout_seconds=120)
    for name, tensor in {"output": one.output, **one.gradients}.items():
        pieces = [part[name] for part in parts]
        if name in PARAMETERS:
            assert_close({name: sum(pieces[1:], pieces[0])}, {name: tensor}, 1e-5)
        else:
            assert torch.equal(torch.cat(pieces, dim=1), tensor), name
