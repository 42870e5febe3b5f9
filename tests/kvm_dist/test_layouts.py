"""The same tokens give the same losses and gradients however they are spread over ranks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.messages import edge_messages
from models.sequence_shards import sequence_shards
from tests.kvm_dist.layout_case import (
    Layout,
    both_ways,
    gated_step,
    mixed_up,
    run_and_go_on,
    run_layout,
)
from tests.models.tiny import tiny_config
from tests.support.ranks import RankFailure, Ranks

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
    Layout(sequence=2, accumulation=3, alternate=True),
    Layout(data=2, sequence=2, accumulation=2, zero_stage=0, alternate=True),
    Layout(sequence=4, accumulation=4, zero_stage=2, alternate=True),
    Layout(sequence=2, head_parallel=2, zero_stage=3, activation_checkpointing=True),
    Layout(sequence=2, data=2, head_parallel=2, zero_stage=2, accumulation=3),
    Layout(sequence=4, head_parallel=2, accumulation=2, alternate=True, activation_checkpointing=True),
    Layout(sequence=2, accumulation=3, two_way=True),
    Layout(data=2, sequence=2, accumulation=6, zero_stage=0, two_way=True, activation_checkpointing=True),
    Layout(sequence=4, accumulation=2, two_way=True, loss_chunk=100),
    Layout(sequence=4, head_parallel=2, accumulation=4, two_way=True),
    Layout(loss_chunk=100, zero_stage=0),
    Layout(loss_chunk=100, data=2, accumulation=3),
    Layout(loss_chunk=100, sequence=2, zero_stage=2, activation_checkpointing=True),
    Layout(loss_chunk=100, sequence=2, zero_stage=3),
    Layout(loss_chunk=100, data=2, zero_stage=3, activation_checkpointing=True),
]
# Full attention of two heads goes by heads on two ranks and by a chain on four; blocks of 32, seven of them.
ALL_KINDS = Layout(
    layers=("kvm", "rwkv7", "sliding_window", "block_window", "ovq", "full_attention"),
    tokens=201,
    sequences=4,
)
LAYOUTS_OF_ALL_KINDS = [
    replace(ALL_KINDS, sequence=2, zero_stage=0),
    replace(ALL_KINDS, sequence=2, accumulation=2, activation_checkpointing=True),
    replace(ALL_KINDS, sequence=2, zero_stage=2, accumulation=2),
    replace(ALL_KINDS, sequence=2, zero_stage=3, activation_checkpointing=True),
    replace(ALL_KINDS, sequence=4, zero_stage=0, activation_checkpointing=True),
    replace(ALL_KINDS, sequence=4, accumulation=2),
    replace(ALL_KINDS, sequence=4, zero_stage=2, activation_checkpointing=True),
    replace(ALL_KINDS, sequence=2, data=2),
    replace(ALL_KINDS, sequence=2, accumulation=2, zero_stage=3, alternate=True),
    replace(ALL_KINDS, sequence=4, accumulation=2, alternate=True, activation_checkpointing=True),
    replace(ALL_KINDS, sequence=4, head_parallel=2, zero_stage=2, activation_checkpointing=True),
    replace(ALL_KINDS, sequence=2, head_parallel=2, zero_stage=3),
]
ODD = Layout(tokens=1001, sequences=2)
ODD_LAYOUTS = [
    replace(ODD, sequence=2),
    replace(ODD, sequence=3),
    replace(ODD, sequence=4, zero_stage=2),
    replace(ODD, sequence=4, head_parallel=2),
    replace(ODD, sequence=4, accumulation=2, two_way=True),
    replace(ODD, sequence=2, data=2, balanced=False),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    started = {size: Ranks(size) for size in (1, 2, 3, 4)}
    yield started
    for group in started.values():
        group.close()


@pytest.fixture(scope="module")
def one_rank(ranks: dict[int, Ranks]) -> dict[str, Any]:
    result: dict[str, Any] = ranks[1].run(run_layout, Layout())[0]
    return result


@pytest.fixture(scope="module")
def odd_on_one_rank(ranks: dict[int, Ranks]) -> dict[str, Any]:
    result: dict[str, Any] = ranks[1].run(run_layout, ODD)[0]
    return result


def assert_same_training(result: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert result["tokens"] == wanted["tokens"]
    assert result["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
    assert result["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in wanted["gradients"].values())
    for name, gradient in wanted["gradients"].items():
        error = float((result["gradients"][name] - gradient).abs().max())
        assert error <= TOLERANCE * largest, f"{name}: off by {error:.1e}, largest gradient {largest:.1e}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_and_gradients_do_not_depend_on_the_layout(
    layout: Layout, ranks: dict[int, Ranks], one_rank: dict[str, Any]
) -> None:
    for result in ranks[layout.ranks].run(run_layout, layout):
        assert_same_training(result, one_rank)


@pytest.fixture(scope="module")
def all_kinds_on_one_rank(ranks: dict[int, Ranks]) -> dict[str, Any]:
    result: dict[str, Any] = ranks[1].run(run_layout, ALL_KINDS)[0]
    return result


@pytest.mark.parametrize("layout", LAYOUTS_OF_ALL_KINDS, ids=str)
def test_every_kind_trains_alike_at_every_stage(
    layout: Layout, ranks: dict[int, Ranks], all_kinds_on_one_rank: dict[str, Any]
) -> None:
    for result in ranks[layout.ranks].run(run_layout, layout):
        assert_same_training(result, all_kinds_on_one_rank)
        start, stop = result["span"]
        expected = all_kinds_on_one_rank["logits"][:, start:stop]
        logits = result["logits"][:, : expected.shape[1]]
        if layout.sequence == 2:
            assert torch.equal(logits, expected)
        assert (logits - expected).abs().max() <= 1e-5


def test_a_chain_of_full_attention_trains_alike_at_stage_3(ranks: dict[int, Ranks]) -> None:
    whole = Layout(layers=("full_attention",), sequences=2)
    (expected,) = ranks[1].run(run_layout, whole)
    for result in ranks[4].run(run_layout, replace(whole, sequence=4, zero_stage=3)):
        assert_same_training(result, expected)


@pytest.mark.parametrize("layout", ODD_LAYOUTS, ids=str)
def test_a_length_that_no_number_of_ranks_divides_trains_and_validates_alike(
    layout: Layout, ranks: dict[int, Ranks], odd_on_one_rank: dict[str, Any]
) -> None:
    results = ranks[layout.ranks].run(run_layout, layout)
    spans = sorted({result["span"] for result in results})
    assert (spans[0][0], spans[-1][1]) == (0, 1024)
    for result in results:
        assert_same_training(result, odd_on_one_rank)
        held_out, wanted = result["held out"], odd_on_one_rank["held out"]
        assert held_out.tokens == wanted.tokens == result["tokens"] == 1001 - 143
        assert held_out.block_tokens == 32
        assert held_out.position_losses == pytest.approx(wanted.position_losses, rel=1e-6)


def test_shards_of_unequal_numbers_of_chunks_train_and_validate_alike(ranks: dict[int, Ranks]) -> None:
    """ZeRO-3 gathers a head of this size; shards of 512 and 480 tokens make 5 and 4 chunks of two rows."""
    layout = Layout(tokens=985, sequences=2, vocab_size=4096, loss_chunk=250)
    (wanted,) = ranks[1].run(run_layout, layout)
    for result in ranks[2].run(run_layout, replace(layout, sequence=2, zero_stage=3)):
        assert_same_training(result, wanted)
        assert result["held out"].position_losses == pytest.approx(
            wanted["held out"].position_losses, rel=1e-6
        )


@pytest.mark.parametrize("sequence", [2, 4])
@pytest.mark.parametrize("head_parallel", [1, 2])
def test_a_shard_has_the_same_bits_on_whichever_rank_it_lies(
    sequence: int, head_parallel: int, ranks: dict[int, Ranks]
) -> None:
    layout = replace(ALL_KINDS, sequence=sequence, head_parallel=head_parallel, zero_stage=0, alternate=True)
    results = ranks[sequence].run(both_ways, layout)
    for ((logits, gradients), _), (_, (turned, turned_gradients)) in zip(
        results, reversed(results), strict=True
    ):
        assert torch.equal(logits, turned)
        for name, gradient in gradients.items():
            assert torch.equal(gradient, turned_gradients[name]), name


def test_a_run_in_turns_goes_on_at_another_layout_and_the_other_way_round(
    ranks: dict[int, Ranks], one_rank: dict[str, Any]
) -> None:
    in_turns, other = Layout(sequence=2, accumulation=3, alternate=True), Layout(data=2, zero_stage=2)
    for layouts in ((in_turns, other), (other, in_turns)):
        for losses in ranks[2].run(run_and_go_on, *layouts):
            assert losses == pytest.approx(one_rank["losses"], rel=1e-6)


MOVES = [
    (Layout(sequence=2, zero_stage=3), Layout(data=2, zero_stage=0, accumulation=2)),
    (Layout(data=2, zero_stage=2), Layout(sequence=2, head_parallel=2, accumulation=2, alternate=True)),
    (Layout(sequence=2, head_parallel=2, accumulation=4, alternate=True, zero_stage=0), Layout(data=2)),
    (Layout(sequence=2, accumulation=2, two_way=True), Layout(data=2, zero_stage=2)),
]
HYBRIDS = [
    {"layers": ("kvm", "rwkv7", "kvm"), "kv_heads": 2, "tokens": 177},
    {"layers": ("kvm", "gated_deltanet"), "tokens": 203},
]


@pytest.mark.parametrize("hybrid", HYBRIDS, ids=str)
def test_hybrids_go_on_from_any_layout_at_any_other(hybrid: dict[str, Any], ranks: dict[int, Ranks]) -> None:
    small: dict[str, Any] = hybrid | {"sequences": 4}
    (whole,) = ranks[1].run(run_layout, Layout(**small))
    for before, after in MOVES:
        for losses in ranks[2].run(run_and_go_on, replace(before, **small), replace(after, **small)):
            assert losses == pytest.approx(whole["losses"], rel=1e-6), (before, after)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_lets_the_last_rank_into_the_next_micro_batch_before_the_first_has_ended_the_last(
    stage: int, ranks: dict[int, Ranks], tmp_path: Path
) -> None:
    layout = Layout(sequence=2, accumulation=2, zero_stage=stage, sequences=2, alternate=True)
    second, first = ranks[2].run(gated_step, layout, tmp_path)
    model = tiny_config(list(layout.layers))
    crossing = edge_messages(model, sequence_shards(model, layout.tokens, 2).spans[1][0])
    for log, phase in ((first, "forward"), (second, "backward")):
        sent = [(one.name, one.bytes) for one in log if one.operation == "send"]
        assert sent == [(one.name, one.size(4)) for one in crossing if one.phase == phase]


def test_messages_of_two_micro_batches_are_never_taken_for_each_other() -> None:
    problem = r"wanted '0\.kvm\.shift of micro-batch 2' .* got '0\.kvm\.shift of micro-batch 0'"
    with Ranks(2) as ranks, pytest.raises(RankFailure, match=problem):
        ranks.run(mixed_up, Layout(sequence=2, alternate=True))


def test_truncated_gradients_change_the_update_and_not_the_loss_before_it(
    ranks: dict[int, Ranks], one_rank: dict[str, Any]
) -> None:
    for result in ranks[2].run(run_layout, Layout(sequence=2, truncate_gradients=True)):
        assert result["losses"][0] == pytest.approx(one_rank["losses"][0], rel=1e-6)
        assert abs(result["norms"][0] / one_rank["norms"][0] - 1) > 1e-4


@pytest.mark.parametrize("layout", [Layout(sequence=2), Layout(sequence=4)], ids=str)
def test_the_forward_on_sequence_ranks_is_bitwise_that_of_one_rank(
    layout: Layout, ranks: dict[int, Ranks], one_rank: dict[str, Any]
) -> None:
    for result in ranks[layout.ranks].run(run_layout, layout):
        start, stop = result["span"]
        assert torch.equal(result["logits"], one_rank["logits"][:, start:stop])


def test_a_masked_sequence_counts_for_nothing(one_rank: dict[str, Any]) -> None:
    assert one_rank["tokens"] == 11 * (128 - 18)
