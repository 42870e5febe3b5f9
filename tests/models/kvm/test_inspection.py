"""The memory as people see it, against the operator and against its definition."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models.kvm import FixedBudget, KVMState
from models.kvm.autograd import run_forward
from models.kvm.chunked import Arguments
from models.kvm.inspection import BlockRead, Folded, inspect_call
from models.kvm.inspection_slots import SlotLives, slots_in_use
from models.kvm.layout import Block, KVMSettings
from models.kvm.reference import Parameters
from models.kvm.torch_passes import TorchPasses
from parallel.sequence.context import NoExchange
from tests.models.kvm.cases import PARAMETERS, PER_TOKEN, Case, random_case

SWITCHES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no radius": {"value_radius": False},
    "no sinks, no gate, no temperatures": {"sinks": 0, "gate": False, "temperatures": False},
    "three sinks, everything gated": {"sinks": 3, "gate_appends": True, "gate_first_state": True},
    "a long window": {"window_chunks": 3},
    "fixed slots": {"budget": FixedBudget(slots=9)},
}


def arguments(case: Case, start: int, stop: int, state: KVMState | None) -> Arguments:
    def of_tokens(name: str) -> Any:
        tensor = case.inputs[name]
        return None if tensor is None else tensor[:, start:stop]

    parameters: Any = [case.inputs[name] for name in PARAMETERS]
    q, k, v, gate = (of_tokens(name) for name in PER_TOKEN)
    return Arguments(
        q,
        k,
        v,
        gate,
        parameters=Parameters(*parameters),
        settings=KVMSettings(**case.settings),
        state=state,
        return_state=True,
        exchange=NoExchange(),
        start=start,
    )


def inspected(case: Case, pieces: tuple[int, ...] = ()) -> tuple[list[Folded | BlockRead], KVMState]:
    """Everything that happened to a sequence read in pieces that end at the given tokens, and the state."""
    steps: list[Folded | BlockRead] = []
    state: KVMState | None = None
    start = 0
    for stop in (*pieces, case.tokens):
        given = arguments(case, start, stop, state)
        output, state = case.call(case.leaves(start, stop), state=state, return_state=True, backend="torch")
        steps += inspect_call(given, output)
        start = stop
    assert state is not None
    return steps, state


def folds_of(steps: list[Folded | BlockRead]) -> list[Folded]:
    return [step for step in steps if isinstance(step, Folded)]


def reads_of(steps: list[Folded | BlockRead]) -> list[BlockRead]:
    return [step for step in steps if isinstance(step, BlockRead)]


def lives_of(steps: list[Folded | BlockRead]) -> SlotLives:
    lives = SlotLives()
    for folded in folds_of(steps):
        lives.fold(folded)
    return lives


@pytest.mark.parametrize("name", SWITCHES)
def test_what_is_read_makes_up_the_output_of_the_operator(name: str) -> None:
    case = random_case(61, dtype=torch.float64, **SWITCHES[name])
    reads = reads_of(inspected(case)[0])
    assert [(read.block.start, read.block.stop) for read in reads] == [
        (at, min(at + 4, 61)) for at in range(0, 61, 4)
    ]
    for read in reads:
        torch.testing.assert_close(read.state + read.window, torch.ones_like(read.window))
        assert read.output_difference < 1e-12
    assert reads[-1].by_slot.shape[1] == reads[-1].block.slots > 4


def test_an_output_that_is_not_the_memorys_shows() -> None:
    case = random_case(61, dtype=torch.float64)
    output, _ = case.call(case.leaves())
    output = output.detach().clone()
    output[0, 40, 1, 3] += 0.5
    reads = reads_of(list(inspect_call(arguments(case, 0, 61, None), output)))
    assert [read.block.start for read in reads if read.output_difference > 1e-9] == [40]
    assert reads[10].output_difference == pytest.approx(0.5)


@pytest.mark.parametrize("name", SWITCHES)
def test_routes_are_those_of_the_operator(name: str) -> None:
    case = random_case(61, dtype=torch.float64, **SWITCHES[name])
    given = arguments(case, 0, 61, None)
    _, attended = run_forward(given.call(TorchPasses), given.tensors())
    folds = folds_of(inspected(case)[0])
    assert torch.equal(torch.cat([one.route for one in folds]), attended.routes[0][0])
    for one in folds:
        assert torch.equal(one.opened.sum(dim=0), torch.full((2,), one.fold.appended))


def test_counts_are_those_of_the_final_state() -> None:
    steps, state = inspected(random_case(61, value_radius=False))
    assert state.counts is not None
    assert torch.equal(lives_of(steps).tokens, state.counts[0].long())


def test_a_slot_knows_how_many_entered_it_and_who_last() -> None:
    steps, _ = inspected(random_case(61), pieces=(4, 30))
    inside: dict[tuple[int, int], list[int]] = {}
    for one in folds_of(steps):
        for place, row in enumerate(one.route.tolist()):
            for head, route in enumerate(row):
                inside.setdefault((head, ~route if route < 0 else route), []).append(one.fold.start + place)
    lives = lives_of(steps)
    assert lives.tokens.shape == lives.opened_by.shape == lives.last_written.shape
    for (head, slot), positions in inside.items():
        assert lives.tokens[head, slot] == len(positions)
        assert lives.last_written[head, slot] == max(positions)


def test_a_slots_radius_is_the_length_of_the_value_that_opened_it() -> None:
    case = random_case(61, dtype=torch.float64)
    steps, state = inspected(case)
    opened_by = lives_of(steps).opened_by
    lengths = torch.cat([one.lengths for one in folds_of(steps)])
    assert state.radii is not None
    torch.testing.assert_close(lengths.T.gather(1, opened_by), state.radii[0])
    v = case.inputs["v"]
    assert v is not None
    torch.testing.assert_close(lengths, v[0, : len(lengths)].norm(dim=-1))


@pytest.mark.parametrize("pieces", [(4, 8, 40), (3, 7, 30, 31), tuple(range(1, 61))])
def test_a_sequence_read_in_pieces_shows_the_same_folds_and_reads(pieces: tuple[int, ...]) -> None:
    case = random_case(61, dtype=torch.float64)
    whole, _ = inspected(case)
    cut, _ = inspected(case, pieces)
    for name in ("route", "similarity", "gate", "lengths"):
        one, other = (torch.cat([getattr(fold, name) for fold in folds_of(steps)]) for steps in (whole, cut))
        torch.testing.assert_close(one, other, equal_nan=True)
    last = reads_of(cut)[-1]
    if last.block.start == 60:
        torch.testing.assert_close(last.by_slot, reads_of(whole)[-1].by_slot)
    assert max(read.output_difference for read in reads_of(cut)) < 1e-12


@pytest.mark.parametrize("name", ["as it is", "three sinks, everything gated"])
def test_similarity_is_the_cosine_with_the_slot_as_it_was_chosen(name: str) -> None:
    case = random_case(41, dtype=torch.float64, **SWITCHES[name])
    weight, bias, k = (case.inputs[one] for one in ("key_norm_weight", "key_norm_bias", "k"))
    assert k is not None

    def norm(row: Tensor) -> Tensor:
        return F.layer_norm(row, row.shape[-1:], weight, bias)

    sums: dict[tuple[int, int], Tensor] = {}
    merged = 0
    for folded in folds_of(inspected(case)[0]):
        assert folded.gate is not None
        tokens = [
            (
                place,
                head,
                norm(torch.cat([torch.zeros(2, dtype=k.dtype), k[0, folded.fold.start + place, head, 2:]])),
            )
            for place in range(len(folded.route))
            for head in range(2)
        ]
        gated = name != "as it is"
        for place, head, kbar in tokens:
            if folded.opened[place, head]:
                sums[head, int(folded.slot[place, head])] = (folded.gate[place, head] if gated else 1) * kbar
                assert folded.similarity[place, head].isnan()
        seen = {at: norm(one) for at, one in sums.items()}
        for place, head, kbar in tokens:
            if not folded.opened[place, head]:
                at = head, int(folded.slot[place, head])
                torch.testing.assert_close(
                    folded.similarity[place, head], F.cosine_similarity(kbar, seen[at], dim=0)
                )
                sums[at] = sums[at] + folded.gate[place, head] * kbar
                merged += 1
    assert merged > 20


def test_query_heads_that_share_a_memory_read_its_slots() -> None:
    case = random_case(61, heads=4, dtype=torch.float64)
    shared = {
        name: tensor[:, :, :2] if name in ("k", "v", "merge_gate") else tensor[:2]
        for name, tensor in case.inputs.items()
        if tensor is not None and (name in ("k", "v", "merge_gate") or name.endswith("temperature"))
    }
    case = case.with_inputs(**shared)
    steps, _ = inspected(case)
    assert folds_of(steps)[-1].route.shape[1] == 2
    assert reads_of(steps)[-1].by_slot.shape[0] == 4
    assert max(read.output_difference for read in reads_of(steps)) < 1e-12


def test_a_batch_or_a_shard_is_refused() -> None:
    case = random_case(9, batch=2)
    given = arguments(case, 0, 9, None)
    with pytest.raises(ValueError, match="one sequence at a time"):
        next(inspect_call(given, given.q))


def read_of(by_slot: list[list[float]], stop: int) -> BlockRead:
    mass = torch.tensor(by_slot)
    block = Block(stop - 4, stop, stop - 8, mass.shape[1], ())
    return BlockRead(block, mass, 1 - mass.sum(dim=-1), 0.0)


def test_slots_in_use_are_the_fewest_that_hold_most_of_the_reads_beside_the_sinks() -> None:
    read = read_of([[0.5, 0.1, 0.1, 0.1, 0.1], [0.0, 0.95, 0.02, 0.0, 0.03]], stop=20)
    assert slots_in_use(read, sinks=1).tolist() == [4, 1]
    assert slots_in_use(read, sinks=1, share=0.5).tolist() == [2, 1]
    assert slots_in_use(read, sinks=0).tolist() == [5, 1]


def test_ages_are_means_over_what_is_read() -> None:
    lives = SlotLives()
    lives.opened_by = torch.tensor([[0, 2, 10]])
    lives.last_written = torch.tensor([[0, 12, 10]])
    opened, written = lives.ages(read_of([[0.6, 0.3, 0.1], [0.9, 0.0, 0.1]], stop=20), sinks=1)
    assert opened.tolist() == pytest.approx([(0.3 * 18 + 0.1 * 10) / 0.4, 10])
    assert written.tolist() == pytest.approx([(0.3 * 8 + 0.1 * 10) / 0.4, 10])
