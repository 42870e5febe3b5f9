"""Which slots tokens go to, and what may never influence a result."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.kvm import FixedBudget, KVMState
from models.kvm.advance import first_maximum
from models.kvm.memory import ROW_BLOCK
from tests.models.kvm.cases import Case, random_case

BACKENDS = ["reference", "torch"]
C = 4


def with_directions(case: Case, directions: list[list[float]]) -> Case:
    """Keys that point where they are told, and an identity norm: similarity is the product of normed keys."""
    keys = torch.tensor(directions)[None, :, None, :]
    assert keys.shape[1] == case.tokens
    width = keys.shape[-1]
    return case.with_inputs(k=keys, key_norm_weight=torch.ones(width), key_norm_bias=torch.zeros(width))


def final_state(case: Case, backend: str) -> KVMState:
    with torch.no_grad():
        _, state = case.call(case.leaves(), backend=backend, return_state=True)
    assert state is not None
    return state


def normed(direction: list[float]) -> Tensor:
    return F.layer_norm(torch.tensor(direction), (len(direction),))


A, B, D, E = [1.0, 0.0, 0.0, -1.0], [0.0, 1.0, -1.0, 0.0], [1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0]
FILLER = [A] * C  # the last chunk stays in the window, whatever it holds


def small_case(directions: list[list[float]], slots: int, sinks: int) -> Case:
    directions = directions + FILLER
    case = random_case(
        len(directions),
        heads=1,
        width=4,
        rotary_dims=0,
        gate=False,
        budget=FixedBudget(slots=slots),
        sinks=sinks,
        window_chunks=1,
    )
    return with_directions(case, directions)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_equally_similar_slots_the_first_that_is_no_sink_is_merged_into(backend: str) -> None:
    state = final_state(small_case([A, B, B, B, B, B, B, B], slots=C, sinks=1), backend)
    assert torch.allclose(state.keys[0, 0, 1], 5 * normed(B), atol=1e-5)
    assert torch.allclose(state.keys[0, 0, 2], normed(B), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_are_never_written(backend: str) -> None:
    state = final_state(small_case([A, B, B, B, A, A, A, A], slots=C, sinks=1), backend)
    assert torch.allclose(state.keys[0, 0, 0], normed(A), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_least_similar_tokens_open_slots_and_of_equals_the_earliest(backend: str) -> None:
    far = [-1.0, 0.0, 0.0, 1.0]
    state = final_state(small_case([A, A, A, A, A, far, far, far], slots=C + 1, sinks=0), backend)
    assert state.keys.shape[2] == C + 1
    assert torch.allclose(state.keys[0, 0, C], 3 * normed(far), atol=1e-5), "the two others join the new slot"
    opened = small_case([A, A, A, A, A, far, far, far], slots=C + 1, sinks=0).inputs["v"]
    assert opened is not None
    assert state.radii is not None
    assert torch.allclose(state.radii[0, 0, C], opened[0, 5, 0].norm())


@pytest.mark.parametrize("backend", BACKENDS)
def test_similarity_to_a_sink_keeps_a_token_from_opening_a_slot(backend: str) -> None:
    state = final_state(small_case([E, A, A, A, E, D, D, D], slots=C + 1, sinks=1), backend)
    assert torch.allclose(state.keys[0, 0, C], 3 * normed(D), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_are_the_tokens_summed_into_each_slot(backend: str) -> None:
    case = small_case([A, B, B, B, B, B, D, D], slots=C, sinks=0)
    state = final_state(replace(case, settings={**case.settings, "value_radius": False}), backend)
    assert state.counts is not None
    assert state.radii is None
    assert state.counts.sum() == 2 * C
    values = case.inputs["v"]
    assert values is not None
    assert torch.allclose(state.values[0, 0].sum(0), values[0, : 2 * C, 0].sum(0), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("changed", [1, 7, 8, 13, 27])
def test_a_later_token_never_changes_an_earlier_output(backend: str, changed: int) -> None:
    case = random_case(40, batch=2)
    with torch.no_grad():
        before, _ = case.call(case.leaves(), backend=backend)
        leaves = case.leaves()
        for name in ("q", "k", "v", "merge_gate"):
            leaves[name][:, changed:] = torch.rand_like(leaves[name][:, changed:]) + 0.5
        after, _ = case.call(leaves, backend=backend)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed:], after[:, changed:])


def test_rows_and_heads_do_not_see_each_other() -> None:
    case = random_case(40, batch=2, heads=2)
    changed = case.leaves()
    with torch.no_grad():
        before, _ = case.call(case.leaves())
        for name in ("q", "k", "v", "merge_gate"):
            changed[name][0, :, 1] = torch.rand_like(changed[name][0, :, 1]) + 0.5
        after, _ = case.call(changed)
    same = torch.ones(2, 2, dtype=torch.bool)
    same[0, 1] = False
    for row in range(2):
        for head in range(2):
            assert torch.equal(before[row, :, head], after[row, :, head]) == same[row, head].item()


def test_two_runs_are_bitwise_equal() -> None:
    case = random_case(203, batch=2, width=16, chunk=16)
    first, second = case.run("torch"), case.run("torch")
    assert torch.equal(first.output, second.output)
    assert torch.equal(first.state.keys, second.state.keys)
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, second.gradients[name]), name


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Deterministic mode fills fresh buffers with NaN: one that is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    "settings", [{}, {"value_radius": False}, {"gate_appends": True, "window_chunks": 3}]
)
def test_nothing_is_read_before_it_is_written(settings: dict[str, Any]) -> None:
    result = random_case(75, batch=2, **settings).run("torch")
    assert result.output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in result.gradients.values())


def test_nothing_beyond_the_tokens_given_is_read() -> None:
    case = random_case(45, batch=2)
    wanted = case.run("torch")
    leaves = case.leaves()
    inside = {}
    for name in ("q", "k", "v", "merge_gate"):
        padded = torch.full((2, 60, *leaves[name].shape[2:]), torch.nan)
        padded[:, 7:52] = leaves[name].detach()
        inside[name] = padded[:, 7:52].requires_grad_()
    output, _ = case.call({**leaves, **inside}, backend="torch")
    output.backward(case.grad_output)
    assert torch.equal(output, wanted.output)
    for name, leaf in inside.items():
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, wanted.gradients[name]), name


def test_of_many_slots_the_first_maximum_is_found_by_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    similarity = torch.randint(0, 40, (2, 50, 9 * ROW_BLOCK), generator=generator).float()  # full of ties
    best, chosen = first_maximum(similarity)
    assert torch.equal(best, similarity.amax(dim=-1))
    places = torch.arange(similarity.shape[2]).expand_as(similarity)
    wanted = places.masked_fill(similarity < best[..., None], similarity.shape[2]).amin(dim=-1)
    assert torch.equal(chosen, wanted)


@pytest.mark.parametrize("sinks", [0, 3])
def test_routes_among_many_slots_are_those_of_the_definition(sinks: int) -> None:
    case = random_case(
        1_100, heads=1, chunk=64, sinks=sinks, budget=FixedBudget(slots=601), dtype=torch.float64
    )
    wanted, got = final_state(case, "reference"), final_state(case, "torch")
    assert wanted.keys.shape[2] == 601
    torch.testing.assert_close(got.keys, wanted.keys)
    torch.testing.assert_close(got.values, wanted.values)
