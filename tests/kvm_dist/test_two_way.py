"""Micro-batches in pairs, one from either end of the ranks at the same time."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kvm_dist.config import DataConfig, RunConfig, TrainConfig
from kvm_dist.plan import make_plan
from kvm_dist.rounds import one_way, two_way
from parallel.config import ParallelConfig
from parallel.sequence.two_way import Meeting
from tests.kvm_dist.layout_case import Layout, first_forwards, kept_bytes, sent_in_forwards
from tests.models.tiny import tiny_config
from tests.support.ranks import RankFailure, Ranks

TWO_WAY = Layout(sequence=2, accumulation=2, sequences=2, layers=("kvm", "rwkv7"), two_way=True)


@pytest.mark.parametrize("waiting", [0, 1])
def test_neither_rank_waits_for_the_other_in_its_first_forward(waiting: int, tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        found = ranks.run(first_forwards, TWO_WAY, tmp_path, waiting)
    assert found == [["forward", "forward", "backward", "backward"]] * 2


def test_in_one_way_the_last_rank_would_wait(tmp_path: Path) -> None:
    one_way = Layout(sequence=2, accumulation=2, sequences=2, layers=("kvm", "rwkv7"), alternate=True)
    with pytest.raises(RankFailure, match="'first forward' was never opened"), Ranks(2) as ranks:
        ranks.run(first_forwards, one_way, tmp_path, 0)


def test_each_half_of_the_ranks_begins_with_what_begins_at_its_end() -> None:
    first, last = [((0, 1), (1, 0)), ((2,), (2,))], [((1, 0), (0, 1)), ((2,), (2,))]
    assert [list(two_way(3, rank, 4)) for rank in range(4)] == [first, first, last, last]
    assert [list(two_way(3, rank, 3)) for rank in range(3)] == [first, first, last]
    assert list(one_way(2)) == [((0,), (0,)), ((1,), (1,))]


def test_members_of_a_node_are_in_the_same_half() -> None:
    """They swap heads by collectives, which come in one order on all."""
    begins = [next(two_way(2, rank, 12, node_ranks=4)) for rank in range(12)]
    assert begins == [((0, 1), (1, 0))] * 8 + [((1, 0), (0, 1))] * 4


def test_the_halves_hand_over_once_both_have_ended_a_forward() -> None:
    """A GPU may run nothing beside a message that waits: tests/parallel/test_one_queue.py."""
    with Ranks(2) as ranks:
        found = ranks.run(sent_in_forwards, TWO_WAY)
    for first, second in found:
        assert first == 0
        assert second > 0


@pytest.mark.parametrize("here", [1, 3])
def test_what_one_half_has_more_to_hand_over_goes_after_its_forward(here: int) -> None:
    sent: list[str] = []
    first, second = Meeting(in_first_half=True), Meeting(in_first_half=False)
    for half, count in ((first, here), (second, 2)):
        half.open()
        for number in range(count):
            half.send(7, (), lambda _, number=number: sent.append(f"send {number}"))  # type: ignore[misc]
    assert sent == []

    def take() -> tuple[Tensor, ...]:
        sent.append("take")
        return ()

    for _ in range(2):
        first.receive(7, take)
    first.settle()
    turns = ["send 0", "take", "send 1", "take", "send 2"]
    assert sent == [one for one in turns if one == "take" or int(one[-1]) < here]
    sent.clear()
    for _ in range(here):
        second.receive(7, take)
    second.settle()
    assert (
        sent
        == {
            1: ["take", "send 0", "send 1"],
            3: ["take", "send 0", "take", "send 1", "take"],
        }[here]
    )
    second.close()
    second.send(7, (), lambda _: sent.append("at once"))
    assert sent[-1] == "at once"


def test_what_was_sent_is_kept_for_two_pairs() -> None:
    layout = Layout(sequence=2, accumulation=5, sequences=5, layers=("kvm", "rwkv7"), two_way=True)
    with Ranks(2) as ranks:
        found = ranks.run(kept_bytes, layout)
    for of_step, _ in found:
        pair, two_pairs, pair_and_one = of_step
        assert two_pairs == 2 * pair
        assert pair < pair_and_one < two_pairs


def run_config(accumulation: int = 2, **parallel: Any) -> RunConfig:
    return RunConfig(
        model=tiny_config(["kvm", "rwkv7"]),
        data=DataConfig(sequence_length=512),
        parallel=ParallelConfig(sequence=4, **parallel),
        train=TrainConfig(batch_sequences=accumulation, accumulation=accumulation),
    )


def test_the_plan_counts_both_micro_batches_of_a_pair() -> None:
    one_way, two_way = (make_plan(run_config(two_way_chain=on)).shards for on in (False, True))
    for shard, mirror, both in zip(one_way, reversed(one_way), two_way, strict=True):
        assert both.memory.activations == shard.memory.activations + mirror.memory.activations
    alone = make_plan(run_config(accumulation=1, two_way_chain=True)).shards
    assert [one.memory for one in alone] == [
        one.memory for one in make_plan(run_config(accumulation=1)).shards
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"zero_stage": 2}, "ranks would meet in every layer"),
        ({"zero_stage": 3}, "use parallel.zero_stage=1 or parallel.alternate_chain=true"),
        ({"alternate_chain": True}, "leave out parallel.alternate_chain"),
    ],
)
def test_what_two_ways_cannot_go_with_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_config(two_way_chain=True, **given)


def test_heads_that_all_ranks_swap_are_refused() -> None:
    values = run_config(two_way_chain=True).model_dump(mode="json")
    values["model"] |= {"layers": ["kvm", "full_attention"], "num_heads": 4}
    with pytest.raises(
        ValueError, match=r"two_way_chain=true with full_attention: its model\.num_heads=4 are"
    ):
        RunConfig.model_validate(values)
    values["parallel"]["truncate_gradients"] = True  # keys go from rank to rank then
    RunConfig.model_validate(values)
