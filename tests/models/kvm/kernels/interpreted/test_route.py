"""Routing shared out to programs: whatever the shares, and on ties and scores that are not numbers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.kvm import FixedBudget, PowerLawBudget
from models.kvm.kernels import advance, launch
from models.kvm.kernels.advance import Routes
from models.kvm.kernels.tuning import TARGETS
from tests.models.kvm.cases import Case, random_case
from tests.models.kvm.kernels.interpreted.exact import assert_is_exact

MANY_SLOTS: dict[str, Any] = {"chunk": 16, "heads": 1, "budget": FixedBudget(slots=90)}
GROWING: dict[str, Any] = {"chunk": 16, "heads": 1, "budget": PowerLawBudget(factor=10, minimum=16)}


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(count: int) -> None:
        monkeypatch.setitem(launch.TARGETS, "interpreter", replace(TARGETS["interpreter"], units=count))

    return use


def routes_of(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Routes, list[int]]:
    """The routes of a forward, and in how many shares the folds' slots were looked at."""
    found: list[Routes] = []
    shares: list[int] = []
    sorted_routes, run = advance._sorted, advance._Step._route

    def kept(*arguments: Any) -> Routes:
        found.append(sorted_routes(*arguments))
        return found[-1]

    def counted(step: Any, count: int) -> None:
        shares.append(count)
        run(step, count)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(advance, "_sorted", kept)
        patch.setattr(advance._Step, "_route", counted)
        case.call(case.leaves(), backend="triton")
    return found[0], shares


@pytest.mark.parametrize("settings", [MANY_SLOTS, GROWING], ids=["fixed", "growing"])
def test_tokens_go_to_the_same_slots_however_these_are_shared_out(
    settings: dict[str, Any], units: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(150, **settings)
    units(1)
    wanted, few = routes_of(case, monkeypatch)
    units(64)
    got, many = routes_of(case, monkeypatch)
    assert max(few) <= 2
    assert max(many) > 4, "more shares than are joined at once"
    assert torch.equal(got.order, wanted.order)
    assert torch.equal(got.codes, wanted.codes)


def test_routes_of_many_shares_are_those_of_the_definition(units: Any) -> None:
    units(64)
    assert_is_exact(random_case(100, gate_appends=True, **GROWING))


def alike(tensor: Tensor, period: int) -> Tensor:
    """Tokens that repeat after a period: equal keys, so equal scores."""
    return tensor[:, torch.arange(tensor.shape[1]) % period]


def test_of_equal_scores_the_first_slot_and_the_earliest_tokens_count_in_all_shares(units: Any) -> None:
    case = random_case(130, seed=5, gate=False, **MANY_SLOTS)
    keys = case.inputs["k"]
    assert keys is not None
    units(64)
    assert_is_exact(case.with_inputs(k=alike(keys, 20)), gradient=1e-4)


def test_scores_that_are_not_numbers_leave_every_token_a_slot(
    units: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(100, **GROWING)
    keys = case.inputs["k"]
    assert keys is not None
    broken = keys.clone()
    broken[:, 60:64] = torch.nan
    units(64)
    routes, _ = routes_of(case.with_inputs(k=broken), monkeypatch)
    folds = routes.order.shape[1]
    assert torch.equal(routes.order.sort(dim=2).values, torch.arange(16).expand(1, folds, 16).int())
    assert int(routes.codes[:, :-1].max()) < 2 * 110
    assert int(routes.codes.min()) >= 0
