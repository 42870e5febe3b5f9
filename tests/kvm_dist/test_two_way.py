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
from tests.kvm_dist.layout_case import Layout, first_forwards, kept_bytes
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


class Swapped:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def take(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.log.append(f"{self.name} brought {name}")
        return ()


def test_messages_over_the_middle_bring_those_of_the_other_half() -> None:
    """A GPU may run nothing beside a message that waits: tests/parallel/test_one_queue.py."""
    meeting, log = Meeting(), list[str]()

    def send(name: str) -> None:
        meeting.send(7, lambda: Swapped(log, name), lambda: log.append(f"sent {name}"))

    def receive(name: str) -> None:
        def plainly() -> tuple[Tensor, ...]:
            log.append(f"received {name}")
            return ()

        meeting.receive(7, name, (), plainly)

    meeting.open()
    send("keys 0")
    send("values 0")
    receive("keys 1")
    receive("values 1")
    meeting.close()
    send("keys 2")
    receive("gradient 2")
    swapped = ["keys 0 brought keys 1", "values 0 brought values 1"]
    assert log == [*swapped, "sent keys 2", "received gradient 2"]
    meeting.open()
    send("keys 3")
    with pytest.raises(ValueError, match=r"that nobody took, by rank: \{7: 1\}"):
        meeting.close()


def test_what_was_sent_is_kept_for_two_pairs_but_over_the_middle() -> None:
    layout = Layout(sequence=4, accumulation=5, sequences=5, layers=("kvm", "rwkv7"), two_way=True)
    with Ranks(4) as ranks:
        found = ranks.run(kept_bytes, layout)
    for of_step, _ in found:
        pair, two_pairs, pair_and_one = of_step
        assert two_pairs == 2 * pair
        assert pair < pair_and_one


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
        ({"head_parallel": 4}, "in the middle of an even number of ranks or nodes, not of 1"),
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
