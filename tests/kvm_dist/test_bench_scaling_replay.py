"""The replay of a step: graphs that can be reckoned by hand, and the wave that states make over ranks."""

from dataclasses import dataclass

import pytest

from kvm_dist.bench.scaling.accumulated import Accumulation, Way, accumulated, turned
from kvm_dist.bench.scaling.program import Program, Receive, Send, Step, Work, collective
from kvm_dist.bench.scaling.replay import Span, replay


@dataclass(frozen=True)
class Wire:
    """Every message costs the same kind of time, whoever sends it."""

    sender: float = 0.0
    seconds_per_byte: float = 0.0
    latency: float = 0.0
    receiver: float = 0.0

    def sender_seconds(self, source: int, to: int, size: int) -> float:
        return self.sender

    def wire_seconds(self, source: int, to: int, size: int) -> float:
        return self.seconds_per_byte * size

    def latency_seconds(self, source: int, to: int) -> float:
        return self.latency

    def receiver_seconds(self, source: int, to: int, size: int) -> float:
        return self.receiver


def spans(programs: list[list[Step]], link: Wire, rank: int) -> list[Span]:
    return [span for _, span in replay(programs, link).of_rank[rank]]


def test_nothing_takes_no_time() -> None:
    assert replay([], Wire()).seconds == 0
    assert replay([[], []], Wire()).ends == [0.0, 0.0]


def test_work_starts_when_the_rank_is_free_and_all_it_waits_for_has_ended() -> None:
    programs: list[list[Step]] = [
        [Work("a", 2.0), Send(1, "early", 1), Receive(1, "late"), Work("b", 1.0)],
        [Work("c", 5.0), Receive(0, "early"), Work("d", 1.0), Send(0, "late", 1), Work("e", 4.0)],
    ]
    assert spans(programs, Wire(latency=0.5), 0) == [Span(0, 2), Span(6.5, 7.5)]
    assert spans(programs, Wire(latency=0.5), 1) == [Span(0, 5), Span(5, 6), Span(6, 10)]


def test_latency_delays_those_who_wait_and_not_the_wire() -> None:
    programs: list[list[Step]] = [
        [Send(1, "x", 1), Send(1, "y", 1)],
        [Receive(0, "x"), Work("a", 0.0), Receive(0, "y"), Work("b", 0.0)],
    ]
    assert [span.start for span in spans(programs, Wire(seconds_per_byte=1.0, latency=10.0), 1)] == [11, 12]


def test_a_lone_rank_takes_the_sum_of_its_work() -> None:
    timeline = replay([[Work("a", 1.5), Work("b", 2.0)]], Wire(latency=9.0))
    assert timeline.seconds == 3.5
    assert timeline.busy_seconds(0) == 3.5
    assert [span for _, span in timeline.of_rank[0]] == [Span(0, 1.5), Span(1.5, 3.5)]


def test_a_message_costs_the_sender_the_wire_and_the_delay() -> None:
    sender: list[Step] = [Work("make", 1.0), Send(1, "state", 100), Work("go on", 5.0)]
    receiver: list[Step] = [Receive(0, "state"), Work("use", 1.0)]
    timeline = replay([sender, receiver], Wire(sender=0.5, seconds_per_byte=0.01, latency=2.0, receiver=0.25))
    assert timeline.of_rank[0][1][1] == Span(1.5, 6.5)
    assert timeline.of_rank[1][0][1] == Span(4.75, 5.75)  # 1 + 0.5 + 100 * 0.01 + 2 + 0.25


def test_messages_of_one_way_share_the_wire_and_those_of_two_ways_do_not() -> None:
    first: list[Step] = [Send(1, "a", 100), Send(1, "b", 100), Receive(1, "c"), Work("end", 0.0)]
    second: list[Step] = [Send(0, "c", 100), Receive(0, "a"), Receive(0, "b"), Work("end", 0.0)]
    timeline = replay([first, second], Wire(seconds_per_byte=0.01))
    assert timeline.of_rank[0][0][1].start == 1.0
    assert timeline.of_rank[1][0][1].start == 2.0


def layered(ranks: int, layers: int, route: float, attend: float) -> list[Program]:
    """The wave: the state of layer l goes from rank to rank before anything is attended to."""
    programs: list[Program] = []
    for rank in range(ranks):
        steps: list[Step] = []
        for layer in range(layers):
            if rank > 0:
                steps.append(Receive(rank - 1, f"{layer}"))
            steps.append(Work("route", route, layer=layer))
            if rank < ranks - 1:
                steps.append(Send(rank + 1, f"{layer}", 8))
            steps.append(Work("attend", attend, layer=layer))
        programs.append(steps)
    return programs


@pytest.mark.parametrize(("ranks", "layers"), [(1, 5), (2, 1), (3, 7), (8, 4), (4, 40)])
def test_the_wave_pays_for_the_serial_part_once_and_not_per_layer(ranks: int, layers: int) -> None:
    route, attend, delay = 2.0, 3.0, 0.25
    timeline = replay(layered(ranks, layers, route, attend), Wire(latency=delay))
    assert timeline.seconds == layers * (route + attend) + (ranks - 1) * (route + delay)


def test_halving_a_cost_of_the_chain_saves_half_of_it_on_every_hop() -> None:
    whole = replay(layered(5, 3, 2.0, 3.0), Wire()).seconds
    halved = replay(layered(5, 3, 1.0, 3.0), Wire()).seconds
    assert whole - halved == (5 - 1 + 3) * 1.0
    assert whole - replay(layered(5, 3, 2.0, 1.5), Wire()).seconds == 3 * 1.5


def test_a_slow_rank_holds_back_those_after_it_and_not_those_before() -> None:
    programs = layered(3, 2, 1.0, 1.0)
    programs[1] = [
        Work(step.name, 3 * step.seconds) if isinstance(step, Work) else step for step in programs[1]
    ]
    timeline = replay(programs, Wire())
    ends = [timeline.of_rank[rank][-1][1].end for rank in range(3)]
    assert ends == [4.0, 13.0, 12.0]


def test_a_collective_waits_for_all_and_holds_all() -> None:
    programs: list[list[Step]] = [
        [Work("short", 1.0), *collective("sum", 0.5), Work("after", 1.0)],
        [Work("long", 4.0), *collective("sum", 0.5), Work("after", 2.0)],
    ]
    timeline = replay(programs, Wire())
    assert [timeline.of_rank[rank][1][1] for rank in (0, 1)] == [Span(4.5, 5.5), Span(4.5, 6.5)]


def test_a_rank_that_several_messages_wake_comes_to_a_collective_once() -> None:
    programs: list[list[Step]] = [
        [*collective("sum", 1.0), Work("end", 1.0)],
        [Receive(2, "a"), Receive(2, "b"), *collective("sum", 1.0), Work("end", 1.0)],
        [Work("x", 1.0), Send(1, "a", 1), Send(1, "b", 1), Work("y", 7.0), *collective("sum", 1.0)],
    ]
    assert replay(programs, Wire()).ends == [10.0, 10.0, 9.0]


def test_collectives_of_some_ranks_leave_the_others_alone() -> None:
    pair, other = (0, 1), (2,)
    programs: list[list[Step]] = [
        [Work("x", 1.0), *collective("sum", 1.0, pair), Work("end", 1.0)],
        [Work("x", 3.0), *collective("sum", 1.0, pair), Work("end", 1.0)],
        [Work("x", 9.0), *collective("sum", 1.0, other), Work("end", 1.0)],
    ]
    timeline = replay(programs, Wire())
    assert [timeline.of_rank[rank][1][1].end for rank in range(3)] == [5.0, 5.0, 11.0]


@pytest.mark.parametrize(
    ("programs", "problem"),
    [
        ([[Receive(1, "a")], []], r"rank 0 waits forever at Receive\(source=1, name='a'"),
        ([[Send(1, "a", 1)], []], "rank 1 never receives 'a' from rank 0"),
        ([[Send(1, "a", 1)], [Receive(0, "b")]], "waits for 'b' but rank 0 sends 'a'"),
        ([[Receive(1, "a"), Send(1, "b", 1)], [Receive(0, "b"), Send(0, "a", 1)]], "waits forever"),
        ([[*collective("x", 1.0)], []], "waits forever"),
        ([[*collective("x", 1.0)], [*collective("y", 1.0)]], "different collectives"),
    ],
)
def test_programs_that_do_not_fit_together_are_refused(programs: list[Program], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replay(programs, Wire())


def there_and_back(ranks: int, layers: int, rest: float, hop: float) -> list[Program]:
    """A micro-batch: a state goes from rank to rank in every layer, its gradient comes back."""
    programs: list[Program] = []
    for rank in range(ranks):
        steps: list[Step] = []
        for layer in range(layers):
            steps += [Receive(rank - 1, f"{layer}")] if rank > 0 else []
            steps.append(Work("route", hop))
            steps += [Send(rank + 1, f"{layer}", 8)] if rank < ranks - 1 else []
            steps.append(Work("attend", rest))
        for layer in reversed(range(layers)):
            steps.append(Work("attend", rest, "backward"))
            steps += [Receive(rank + 1, f"{layer} gradient")] if rank < ranks - 1 else []
            steps.append(Work("share out", hop, "backward"))
            steps += [Send(rank - 1, f"{layer} gradient", 8)] if rank > 0 else []
        programs.append(steps)
    return programs


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8])
def test_turns_leave_half_of_the_waiting_and_one_wait_a_step(ranks: int, micro_batches: int) -> None:
    layers, rest, hop = 8, 9.0, 1.0
    programs = there_and_back(ranks, layers, rest, hop)
    work = micro_batches * 2 * layers * (rest + hop)
    plain = replay(accumulated(programs, Accumulation(micro_batches)), Wire()).seconds
    in_turns = replay(accumulated(programs, Accumulation(micro_batches, "turns")), Wire()).seconds
    assert plain - work == pytest.approx(2 * (ranks - 1) * hop * micro_batches)
    assert in_turns - work == pytest.approx((ranks - 1) * hop * (micro_batches + 1))


def test_turns_gain_nothing_where_ranks_meet_after_every_micro_batch() -> None:
    programs: list[Program] = [[*one, *collective("reduce", 0.5)] for one in there_and_back(4, 8, 9.0, 1.0)]
    plain, in_turns = (
        replay(accumulated(programs, Accumulation(4, way)), Wire()).seconds for way in ("one", "turns")
    )
    assert plain == in_turns


def test_ranks_of_a_turned_step_are_those_of_the_other_end() -> None:
    programs: list[Program] = [[Send(2, "a", 1)], [*collective("b", 1.0, (1, 2))], [Receive(0, "a")]]
    programs[2] = [*collective("b", 1.0, (1, 2)), *programs[2]]
    there = turned(programs)
    assert there == [
        [*collective("b", 1.0, (0, 1)), Receive(2, "a")],
        [*collective("b", 1.0, (0, 1))],
        [Send(0, "a", 1)],
    ]
    assert turned(there) == programs


PAIR = Accumulation(2, "pairs")


def named(program: Program) -> list[str]:
    """What a rank does; of work the phase."""
    words = {Send: "send", Receive: "receive"}
    return [
        f"{step.phase} {step.name}" if isinstance(step, Work) else f"{words[type(step)]} {step.name}"
        for step in program
    ]


def test_two_ranks_begin_a_pair_on_both_ends_and_never_wait() -> None:
    """Either is busy with its own micro-batch until the state of the other's is there, and so on the way
    back."""
    programs = accumulated(there_and_back(2, 1, rest=9.0, hop=1.0), PAIR)
    first, second = replay(programs, Wire()).of_rank
    assert [span for _, span in first] == [span for _, span in second] == [
        Span(0, 1), Span(1, 10),  # route and attend, of its own
        Span(10, 11), Span(11, 20),  # and of the other
        Span(20, 29), Span(29, 30),  # attend and share out, of the other
        Span(30, 39), Span(39, 40),  # and of its own
    ]  # fmt: skip
    steps = """
        forward route, send 0 of micro-batch {own}, forward attend,
        receive 0 of micro-batch {other}, forward route, forward attend,
        backward attend, backward share out, send 0 gradient of micro-batch {other},
        backward attend, receive 0 gradient of micro-batch {own}, backward share out
    """
    for rank, program in enumerate(programs):
        written = " ".join(steps.format(own=rank, other=1 - rank).split())
        assert named(program) == written.split(", ")


def test_the_middle_one_of_three_ranks_holds_the_first_up_and_not_the_last() -> None:
    """It is of the first half: what begins on rank 0 goes first."""
    timeline = replay(accumulated(there_and_back(3, 1, rest=9.0, hop=1.0), PAIR), Wire())
    starts = [[span.start for _, span in worked] for worked in timeline.of_rank]
    assert starts == [
        [0, 1, 12, 13, 22, 31, 32, 43],  # waits for the state until 12, for its gradient from 41 to 43
        [1, 2, 11, 12, 21, 32, 33, 42],  # 30 to 32: for the gradient of what ends on rank 0
        [0, 1, 10, 11, 20, 29, 30, 39],
    ]
    assert timeline.ends == [44, 43, 40]


def waited(programs: list[Program], accumulation: Accumulation) -> float:
    """Seconds of a step beside its work, of which every rank has as much."""
    timeline = replay(accumulated(programs, accumulation), Wire())
    return timeline.seconds - timeline.busy_seconds(0)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 8])
def test_pairs_wait_from_the_middle_to_one_end_and_a_last_one_alone_from_end_to_end(
    ranks: int, micro_batches: int
) -> None:
    hop = 0.75
    programs = there_and_back(ranks, 8, rest=9.0, hop=hop)
    pairs, alone = divmod(micro_batches, 2)
    from_the_middle = 4 * ((ranks - 1) // 2) * hop  # two forwards of the pair and two backwards
    from_end_to_end = 2 * (ranks - 1) * hop
    wanted = pairs * from_the_middle + alone * from_end_to_end
    assert waited(programs, Accumulation(micro_batches, "pairs")) == pytest.approx(wanted)


@pytest.mark.parametrize(("ranks", "node_ranks", "leading"), [(4, 1, 2), (5, 1, 3), (6, 2, 4), (4, 4, 4)])
def test_each_half_begins_and_ends_with_the_micro_batch_of_its_end(
    ranks: int, node_ranks: int, leading: int
) -> None:
    """Ranks 0 .. leading - 1 with the even one; halves are of whole nodes."""
    programs: list[Program] = [
        [Work(f"shard {rank}", 1.0), Work(f"shard {rank}", 1.0, "backward")] for rank in range(ranks)
    ]
    found = accumulated(programs, Accumulation(3, "pairs"), node_ranks)
    for rank, program in enumerate(found):
        even, odd = f"shard {rank}", f"shard {ranks - 1 - rank}"
        own, other = (even, odd) if rank < leading else (odd, even)
        phases = [(own, "forward"), (other, "forward"), (other, "backward"), (own, "backward")]
        phases += [(even, "forward"), (even, "backward")]  # of the last, which has no partner
        assert [(step.name, step.phase) for step in program if isinstance(step, Work)] == phases


@pytest.mark.parametrize("way", ["turns", "pairs"])
def test_no_way_adds_to_what_a_rank_computes(way: Way) -> None:
    programs = layered(3, 2, 1.0, 2.0)
    programs[0] = [Work("long", 7.0), *programs[0]]
    busy = replay(programs, Wire())
    both = replay(accumulated(programs, Accumulation(2, way)), Wire())
    for rank in range(3):
        assert both.busy_seconds(rank) == busy.busy_seconds(rank) + busy.busy_seconds(2 - rank)
