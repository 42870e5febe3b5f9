"""Decoding adds tokens to a window in place, and no state sees another's tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.kvm import KVMState
from models.kvm.window_room import WindowRoom
from tests.models.kvm.cases import PER_TOKEN, Case, assert_close, random_case, state_tensors

C, L = 4, 8


def step(case: Case, at: int, state: KVMState | None, count: int = 1, **more: Any) -> Any:
    """A call on `count` tokens from `at` on."""
    leaves = {
        name: one.detach()[:, at : at + count] if name in PER_TOKEN else one.detach()
        for name, one in case.leaves().items()
    }
    with torch.no_grad():
        return case.call(leaves, backend="triton", state=state, **{"return_state": True, **more})


def held(state: KVMState | None) -> KVMState:
    assert state is not None
    return state


def memory(state: KVMState) -> tuple[int, ...]:
    """Where the window's tensors lie."""
    windows = (state.window_keys, state.window_values, state.window_gate)
    return tuple(one.untyped_storage().data_ptr() for one in windows if one is not None)


def test_a_window_stays_where_it_is_until_a_chunk_is_folded_in() -> None:
    case = random_case(24, batch=2, heads=2)
    _, state = step(case, 0, None, count=9)
    places = []
    for at in range(9, 24):
        _, state = step(case, at, state)
        places.append(memory(held(state)))
    assert places[0] == places[1] == places[2]  # tokens 9 to 11
    for first in (3, 7, 11):  # tokens 12, 16, 20 open a chunk
        assert len(set(places[first : first + 4])) == 1
        assert places[first] != places[first - 1]


def test_a_window_holds_no_more_memory_than_a_full_one() -> None:
    case = random_case(11, heads=2, width=8)
    _, state = step(case, 0, None, count=9)
    _, state = step(case, 9, state)
    assert held(state).window_keys.untyped_storage().nbytes() == L * 2 * 8 * 4


@pytest.mark.parametrize("settings", [{}, {"gate": False, "batch": 2}])
def test_sequences_that_go_on_from_one_state_do_not_see_each_other(settings: dict[str, Any]) -> None:
    case, other = random_case(16, **settings), random_case(16, seed=9, **settings)
    parameters = {name: one for name, one in case.inputs.items() if name not in PER_TOKEN}
    other = other.with_inputs(**parameters)
    _, before = step(case, 0, None, count=9)
    _, before = step(case, 9, before)
    kept = {name: one.clone() for name, one in state_tensors(held(before)).items()}
    _, ours = step(case, 10, before)
    after = {name: one.clone() for name, one in state_tensors(held(ours)).items()}
    _, theirs = step(other, 10, before)
    for name, one in state_tensors(held(before)).items():
        assert torch.equal(one, kept[name]), name
    for name, one in state_tensors(held(ours)).items():
        assert torch.equal(one, after[name]), name
    assert not torch.equal(held(theirs).window_keys, held(ours).window_keys)
    whole, _ = step(case, 0, None, count=12)
    got, _ = step(case, 11, ours)
    assert_close({"output": got}, {"output": whole[:, 11:]}, 1e-5)


def test_a_call_that_keeps_no_state_writes_nothing() -> None:
    case = random_case(12)
    _, before = step(case, 0, None, count=9)
    _, before = step(case, 9, before)
    room = held(before).room
    assert room is not None
    room.keys[:, 6:] = 7.0
    wanted, _ = step(case, 10, before, return_state=False)
    assert bool((room.keys[:, 6:] == 7.0).all())
    got, after = step(case, 10, before)
    assert torch.equal(got, wanted)
    assert memory(held(after)) == memory(held(before)), "the place was still free"


def test_a_state_whose_tensors_are_mapped_has_no_part_in_the_room() -> None:
    case = random_case(12)
    _, state = step(case, 0, None, count=9)
    _, state = step(case, 9, state)

    def doubled(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor])

    twice = held(state).map(doubled)
    assert twice.room is None
    assert memory(twice) != memory(held(state))


def test_room_is_only_for_tokens_of_its_dtype() -> None:
    keys = torch.zeros(1, L, 2, 8)
    room = WindowRoom(keys, keys.clone(), torch.zeros(1, L, 2), used=3)
    gate = torch.zeros(1, 1, 2)
    assert room.fits((torch.zeros(1, 1, 2, 8), gate))
    assert not room.fits((torch.zeros(1, 1, 2, 8, dtype=torch.float16), gate))
    assert not room.fits((torch.zeros(1, 1, 2, 8), gate.half()))
    assert not WindowRoom(keys, keys, None, used=3).fits((torch.zeros(1, 1, 2, 8), gate))


def test_a_place_is_taken_once_and_only_behind_the_newest_token() -> None:
    keys = torch.zeros(1, L, 2, 8)
    room = WindowRoom(keys, keys, None, used=L - 1)
    assert not room.take(L - 2)
    assert room.take(L - 1)
    assert not room.take(L - 1)
    assert not room.take(L), "there is no room left"
