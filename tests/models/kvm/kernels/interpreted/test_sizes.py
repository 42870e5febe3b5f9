"""The largest sizes that the kernels take, and widths that tiles pad."""

import pytest
import torch

from models.kvm import FixedBudget
from models.kvm.kernels import tuning
from models.kvm.kernels.tuning import Tile
from tests.models.kvm.cases import random_case
from tests.models.kvm.kernels.interpreted.exact import assert_is_exact, rounded


def test_heads_of_256_columns() -> None:
    assert_is_exact(random_case(27, heads=1, width=256, rotary_dims=128, gate_appends=True))


def test_heads_of_130_columns_in_half_precision() -> None:
    case = rounded(random_case(27, heads=1, width=130, rotary_dims=64), torch.float16)
    assert_is_exact(case, output=2e-3, gradient=5e-3)


def test_chunks_of_512_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "choose", lambda *_: Tile(128, 128))  # the interpreter pays per tile
    budget = FixedBudget(slots=530)
    assert_is_exact(random_case(1033, heads=1, width=16, chunk=512, window_chunks=1, budget=budget))
