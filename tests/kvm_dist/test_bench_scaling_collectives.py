"""Collectives that are begun and ended apart: what they hide, how they queue, and what is refused."""

import pytest

from kvm_dist.bench.scaling.accumulated import Accumulation, Way, accumulated, turned
from kvm_dist.bench.scaling.cluster import CLUSTERS
from kvm_dist.bench.scaling.program import Begin, End, Program, Receive, Send, Step, Work, collective
from kvm_dist.bench.scaling.replay import Timeline, replay

PAIR = (0, 1)


def replayed(*programs: Program) -> Timeline:
    """No program here sends anything; a link is a link."""
    return replay(programs, CLUSTERS["H200"])


def begun_and_ended(work: float, swap: float) -> list[Step]:
    return [Work("before", 1.0), Begin("swap", swap), Work("beside", work), End("swap"), Work("after", 1.0)]


@pytest.mark.parametrize(("work", "swap"), [(0.0, 4.0), (3.0, 4.0), (4.0, 4.0), (7.0, 4.0), (2.0, 0.0)])
def test_what_is_computed_beside_a_collective_hides_the_shorter_of_the_two(work: float, swap: float) -> None:
    at_once: list[Step] = [Work("before", 1.0), Work("beside", work), *collective("swap", swap)]
    at_once.append(Work("after", 1.0))
    hidden = replayed(at_once, at_once).seconds - replayed(*[begun_and_ended(work, swap)] * 2).seconds
    assert hidden == min(work, swap)


def test_a_collective_starts_when_the_last_member_has_begun_it() -> None:
    late: list[Step] = [Work("long", 5.0), Begin("swap", 2.0), Work("beside", 1.0), End("swap")]
    early: list[Step] = [Work("short", 1.0), Begin("swap", 2.0), Work("beside", 3.0), End("swap")]
    timeline = replayed(early, late)
    assert timeline.ends == [7.0, 7.0]
    assert [span.end for _, span in timeline.of_rank[0]] == [1.0, 4.0]


def test_collectives_of_the_same_ranks_queue_and_those_of_others_do_not() -> None:
    both: list[Step] = [
        Begin("a", 2.0, PAIR),
        Begin("b", 3.0, PAIR),
        Work("beside", 1.0),
        End("b", PAIR),
        Work("both are done", 0.0),
        End("a", PAIR),
        *collective("c", 1.0, PAIR),
    ]
    alone: list[Step] = [Begin("a", 2.0, (2,)), *collective("c", 3.0, (2,)), End("a", (2,))]
    timeline = replayed(both, both, alone)
    assert timeline.of_rank[0][1][1].start == 5.0
    assert timeline.ends == [6.0, 6.0, 5.0]


def test_a_queue_is_not_held_by_what_was_done_long_ago() -> None:
    steps: list[Step] = [Begin("a", 2.0), Work("x", 9.0), Begin("b", 3.0), End("b"), End("a")]
    assert replayed(steps, steps).ends == [12.0, 12.0]


def test_members_may_end_collectives_in_other_orders_than_they_began_them() -> None:
    first: list[Step] = [Begin("a", 2.0), Begin("b", 1.0), End("a"), End("b")]
    second: list[Step] = [Begin("a", 2.0), Begin("b", 1.0), End("b"), End("a")]
    assert replayed(first, second).ends == [3.0, 3.0]


@pytest.mark.parametrize(
    ("programs", "problem"),
    [
        ([[End("x")]], r"rank 0 ends 'x' of ranks \(0,\) without having begun it"),
        ([[Begin("x", 1.0), End("y")]], "rank 0 ends 'y' .*without having begun it"),
        ([[*collective("x", 1.0), End("x")]], "rank 0 ends 'x' .*without having begun it"),
        ([[Begin("x", 1.0, PAIR), End("x", (0,))], []], r"'x' of ranks \(0,\) without having begun it"),
        ([[Begin("x", 1.0)]], "rank 0 never ends 'x', which it began"),
        ([[Begin("x", 1.0)], []], "rank 0 never ends 'x', which it began"),
        ([[Begin("x", 1.0)], [*collective("x", 1.0)]], "rank 0 never ends 'x', which it began"),
        ([[Begin("x", 1.0), End("x")], []], r"rank 0 waits forever at End\(name='x'"),
        ([[Begin("x", 1.0), Begin("x", 1.0), End("x")]], "rank 0 begins 'x' again before it has ended it"),
        (
            [
                [Begin("x", 1.0), Begin("y", 1.0), End("x"), End("y")],
                [Begin("y", 1.0), Begin("x", 1.0), End("x"), End("y")],
            ],
            "different collectives: rank 1 begins 'y', rank 0 began 'x'",
        ),
        ([[*collective("x", 1.0, (1,))], []], r"rank 0 begins 'x' of ranks \(1,\), to which it is foreign"),
        (
            [
                [Begin("x", 1.0), Receive(1, "a"), End("x")],
                [Begin("x", 1.0), End("x"), Begin("y", 1.0), End("y"), Send(0, "a", 1)],
            ],
            "rank 0 waits forever at Receive",
        ),
    ],
)
def test_collectives_that_do_not_fit_together_are_refused(programs: list[Program], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replayed(*programs)


def test_micro_batches_keep_their_collectives_apart() -> None:
    """Swaps of one micro-batch may run while the next has begun."""
    steps: list[Step] = [Begin("swap", 3.0), Work("beside", 1.0), End("swap"), Work("after", 1.0)]
    programs = accumulated([steps, steps], Accumulation(4))
    assert [step.name for step in programs[0] if isinstance(step, Begin)] == [
        f"swap of micro-batch {number}" for number in range(4)
    ]
    assert replay(programs, CLUSTERS["H200"]).ends == [16.0, 16.0]


@pytest.mark.parametrize("way", ["one", "turns", "pairs"])
def test_micro_batches_overlap_their_collectives_alike_in_either_direction(way: Way) -> None:
    """Two nodes of two ranks, of which the first takes longer to begin."""

    def program(node: int) -> list[Step]:
        members = (2 * node, 2 * node + 1)
        return [
            Work("x", 2.0 - node),
            Begin("a", 2.0, members),
            Begin("b", 2.0, members),
            Work("y", 1.0),
            End("b", members),
            End("a", members),
        ]

    programs = [program(rank // 2) for rank in range(4)]
    micro_batches = 4
    step = accumulated(programs, Accumulation(micro_batches, way), node_ranks=2)
    timeline = replay(step, CLUSTERS["H200"])
    slow, fast = 2.0 + 4.0, 1.0 + 4.0
    expected = [slow, fast] if way == "one" else [(slow + fast) / 2] * 2
    assert timeline.ends == [micro_batches * seconds for seconds in expected for _ in range(2)]


def test_turned_ranks_begin_and_end_with_the_members_of_the_other_end() -> None:
    programs: list[Program] = [[Work("x", 1.0)], [Begin("a", 1.0, (1, 2)), End("a", (1, 2))]]
    programs.append(programs[1])
    mirrored = [Begin("a", 1.0, (0, 1)), End("a", (0, 1))]
    assert turned(programs) == [mirrored, mirrored, [Work("x", 1.0)]]
