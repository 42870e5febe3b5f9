"""The same tokens give the same losses and gradients however they are spread over ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kvm_dist.layout_case import Layout, run_layout
from tests.support.ranks import Ranks, run_ranks

TOLERANCE = 2e-6  # of the largest entry: float32 sums in another order

LAYOUTS = [
    Layout(accumulation=3),
    Layout(zero_stage=0, activation_checkpointing=True),
    Layout(data=2),
    Layout(data=2, accumulation=3),
    Layout(sequence=2),
    Layout(sequence=2, accumulation=3, activation_checkpointing=True),
    Layout(sequence=2, zero_stage=0),
    Layout(sequence=2, zero_stage=2),
    Layout(sequence=2, zero_stage=3),
    Layout(data=2, sequence=2),
    Layout(data=2, sequence=2, accumulation=3),
    Layout(sequence=4, zero_stage=2),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    started = {size: Ranks(size) for size in (1, 2, 4)}
    yield started
    for group in started.values():
        group.close()


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    result: dict[str, Any] = run_ranks(run_layout, 1, Layout())[0]
    return result


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_and_gradients_do_not_depend_on_the_layout(
    layout: Layout, ranks: dict[int, Ranks], one_rank: dict[str, Any]
) -> None:
    results = ranks[layout.ranks].run(run_layout, layout, timeout_seconds=120)
    for result in results:
        assert result["tokens"] == one_rank["tokens"]
        assert result["losses"] == pytest.approx(one_rank["losses"], rel=1e-6)
        assert result["norms"] == pytest.approx(one_rank["norms"], rel=1e-5)
        largest = max(float(gradient.abs().max()) for gradient in one_rank["gradients"].values())
        for name, gradient in one_rank["gradients"].items():
            error = float((result["gradients"][name] - gradient).abs().max())
            assert error <= TOLERANCE * largest, f"{name}: off by {error:.1e}, largest gradient {largest:.1e}"


@pytest.mark.parametrize("layout", [Layout(sequence=2), Layout(sequence=4)], ids=str)
def test_the_forward_on_sequence_ranks_is_bitwise_that_of_one_rank(
    layout: Layout, ranks: dict[int, Ranks], one_rank: dict[str, Any]
) -> None:
    for result in ranks[layout.ranks].run(run_layout, layout, timeout_seconds=120):
        start, stop = result["span"]
        assert torch.equal(result["logits"], one_rank["logits"][:, start:stop])


def test_a_masked_sequence_counts_for_nothing(one_rank: dict[str, Any]) -> None:
    assert one_rank["tokens"] == 11 * (128 - 18)
