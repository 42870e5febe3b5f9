"""When tokens enter the state and how many slots there are: pure functions of the position."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.kvm import FixedBudget, PowerLawBudget, SaturatingBudget, SlotBudget
from models.kvm.layout import (
    Fold,
    KVMSettings,
    plan_call,
    slots_covering,
    tokens_covered,
    tokens_covered_ahead,
    window_start,
)


@st.composite
def settings(draw: st.DrawFn) -> KVMSettings:
    chunk = draw(st.integers(1, 9))
    budgets: list[SlotBudget] = [
        FixedBudget(slots=draw(st.integers(chunk, 40))),
        PowerLawBudget(
            factor=draw(st.floats(0.1, 20)),
            exponent=draw(st.floats(0.1, 1)),
            minimum=draw(st.integers(1, 30)),
            round_down=draw(st.integers(1, 8)),
        ),
        SaturatingBudget(limit=draw(st.integers(chunk, 60)), minimum=draw(st.integers(1, 9))),
    ]
    return KVMSettings(
        draw(st.sampled_from(budgets)),
        chunk=chunk,
        window_chunks=draw(st.integers(1, 4)),
        sinks=draw(st.integers(0, chunk - 1)),
        max_slots=draw(st.none() | st.integers(chunk, 50)),
    )


@given(settings(), st.integers(0, 150))
def test_slots_grow_by_a_chunk_at_most_and_never_pass_their_bounds(one: KVMSettings, tokens: int) -> None:
    slots = 0
    for fold in plan_call(one, 0, tokens).folds:
        assert fold.slots_before == slots
        assert 0 <= fold.appended <= one.chunk
        slots = fold.slots_after
        assert slots <= fold.stop, "more slots than tokens"
        assert slots <= (one.max_slots or slots)
        assert slots <= max(one.budget.slots_at(fold.stop + one.halo), one.chunk)
    assert slots >= min(one.chunk, tokens_covered(one, tokens))
    assert slots == slots_covering(one, tokens_covered(one, tokens))


@given(settings(), st.integers(1, 150))
def test_every_earlier_token_is_in_the_window_or_in_the_state_and_never_in_both(
    one: KVMSettings, tokens: int
) -> None:
    covered = 0
    for block in plan_call(one, 0, tokens).blocks:
        for fold in block.folds:
            assert fold.start == covered
            covered = fold.stop
        assert block.window_start == (covered if block.slots else 0)
        assert block.stop - block.window_start <= one.window
        assert block.start // one.chunk == (block.stop - 1) // one.chunk


@given(settings(), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_pieces_fold_the_same_tokens_into_the_same_slots(one: KVMSettings, lengths: list[int]) -> None:
    whole = plan_call(one, 0, sum(lengths))
    pieces = []
    start = 0
    for length in lengths:
        piece = plan_call(one, start, start + length)
        assert piece.covered_start == tokens_covered(one, start)
        assert piece.blocks[0].window_start >= window_start(one, start), "a state keeps no such token"
        assert all(fold.start >= window_start(one, start) for fold in piece.folds)
        pieces += [(fold.stop, fold.slots_after) for fold in piece.folds if not fold.is_first_state]
        start += length
    assert pieces == [(fold.stop, fold.slots_after) for fold in whole.folds if not fold.is_first_state]


@given(settings(), st.lists(st.integers(1, 6), min_size=2, max_size=6))
def test_shards_fold_the_same_tokens_into_the_same_slots(one: KVMSettings, chunks: list[int]) -> None:
    whole = plan_call(one, 0, one.chunk * sum(chunks))
    shards: list[Fold] = []
    start = 0
    for rank, count in enumerate(chunks):
        stop = start + count * one.chunk
        last = rank == len(chunks) - 1
        shard = plan_call(one, start, stop, ahead_at_start=rank > 0, ahead_at_stop=not last)
        if rank > 0:
            assert shard.covered_start == tokens_covered_ahead(one, start)
            first_needed = min([shard.blocks[0].window_start, *(fold.start for fold in shard.folds)])
            assert first_needed >= max(0, start - one.halo), "a token is needed that no halo brings"
        shards += shard.folds
        start = stop
    assert tuple(shards) == whole.folds


def test_the_papers_main_setting_at_32768_tokens() -> None:
    main = KVMSettings(PowerLawBudget())
    plan = plan_call(main, 0, 32_768)
    assert len(plan.blocks) == 128
    assert plan.covered_stop == 32_768 - 512
    assert plan.blocks[-1].slots == int(16 * (32_768 - 256) ** 0.5)
    assert [block.slots for block in plan.blocks[:4]] == [0, 0, 256, 443]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sinks": 8}, "sinks=8"),
        ({"sinks": -1}, "sinks=-1"),
        ({"chunk": 0}, "chunk=0"),
        ({"window_chunks": 0}, "window_chunks=0"),
        ({"rotary_dims": -2}, "rotary_dims=-2"),
        ({"max_slots": 7}, "max_slots=7"),
        ({"budget": FixedBudget(slots=7)}, "budget.slots=7"),
        ({"budget": SaturatingBudget(limit=7)}, "budget.limit=7"),
    ],
)
def test_settings_that_could_never_act_are_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        KVMSettings(**{"budget": PowerLawBudget(), "chunk": 8, **changed})
