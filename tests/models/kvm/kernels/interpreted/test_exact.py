"""Kernels against the definition in float64: every switch, odd lengths, odd sizes, halves."""

from typing import Any

import pytest
import torch

from models.kvm import FixedBudget, SaturatingBudget
from tests.models.kvm.cases import random_case
from tests.models.kvm.kernels.interpreted.exact import assert_is_exact, rounded

C, L = 4, 8  # chunk and window of the random cases

SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no sinks, no gate, no temperatures": {"sinks": 0, "gate": False, "temperatures": False},
    "all slots but one are sinks, no rotary": {"sinks": C - 1, "rotary_dims": 0},
    "gated appends": {"gate_appends": True},
    "both gated": {"gate_first_state": True, "gate_appends": True},
    "gated first state": {"gate_first_state": True},
    "no radius, both gated": {"value_radius": False, "gate_first_state": True, "gate_appends": True},
    "no radius, no gate": {"value_radius": False, "gate": False},
    "fixed, one chunk": {"budget": FixedBudget(slots=9), "window_chunks": 1},
    "saturating, three chunks": {"budget": SaturatingBudget(limit=16), "window_chunks": 3},
    "few slots, nearly all rotary": {"max_slots": 6, "rotary_dims": 5},
    "append all, odd width": {"budget": FixedBudget(slots=1000), "width": 5},
    "chunk of one token": {"chunk": 1, "sinks": 0, "rotary_dims": 0, "tokens": 7},
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch(switch: str) -> None:
    assert_is_exact(random_case(**{"tokens": 22, "heads": 1, **SWITCHES[switch]}))


@pytest.mark.parametrize("tokens", [1, C - 1, C, C + 1, L, L + 1])
def test_every_edge_of_chunk_and_window(tokens: int) -> None:
    assert_is_exact(random_case(tokens, heads=1))


def test_more_heads_rows_slots_and_columns_than_one_tile_holds() -> None:
    case = random_case(65, width=24, chunk=20, budget=FixedBudget(slots=37), seed=1)
    assert_is_exact(case)


@pytest.mark.parametrize("settings", [{}, {"value_radius": False, "gate_appends": True}])
def test_half_precision_tokens_are_summed_in_float32(settings: dict[str, Any]) -> None:
    """Weights and probabilities are rounded to the tokens' dtype on their way through a product."""
    case = rounded(random_case(41, width=16, chunk=8, heads=1, **settings), torch.float16)
    assert_is_exact(case, output=2e-3, gradient=5e-3)


def test_zero_values_give_finite_gradients_equal_to_the_definition() -> None:
    case = random_case(22, heads=1)
    values = case.inputs["v"]
    assert values is not None
    values[:, ::3] = 0
    assert_is_exact(case)
