"""Programs of a step of several micro-batches: all in one direction, in turns, in pairs. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvm_dist.bench.scaling.program import Begin, End, Program, Receive, Send, Step, Work
from kvm_dist.rounds import one_way, two_way

Way = Literal["one", "turns", "pairs"]
Phase = Literal["forward", "backward"]
_LABELS: dict[Way, str] = {"one": "", "turns": " in turns", "pairs": " two ways at once"}


@dataclass(frozen=True)
class Accumulation:
    """Of a step. way: one: every micro-batch begins on the first rank; turns: every second one on the last;
    pairs: so do they, each beside the one before it, from both ends of the ranks at once."""

    micro_batches: int = 1
    way: Way = "one"

    @property
    def label(self) -> str:
        count = f"{self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}"
        return count + _LABELS[self.way]

    def order(self, rank: int, ranks: int, node_ranks: int = 1) -> Iterator[tuple[int, Phase]]:
        """Micro-batches, and what is run of them next: as the train step of one of `ranks` ranks does it."""
        pairs = self.way == "pairs"
        rounds = (
            two_way(self.micro_batches, rank, ranks, node_ranks) if pairs else one_way(self.micro_batches)
        )
        for forwards, backwards in rounds:
            yield from ((number, "forward") for number in forwards)
            yield from ((number, "backward") for number in backwards)


def accumulated(
    programs: Sequence[Program], accumulation: Accumulation, node_ranks: int = 1
) -> list[Program]:
    """programs: of one micro-batch. node_ranks: neighbours that split heads, each of which has a program."""
    if accumulation.micro_batches == 1:
        return list(programs)
    ways = [[_by_phase(program) for program in programs]]
    if accumulation.way != "one":
        ways.append([_by_phase(program) for program in turned(programs)])
    return [
        [
            _of_micro_batch(step, number)
            for number, phase in accumulation.order(rank, len(programs), node_ranks)
            for step in ways[number % len(ways)][rank][phase]
        ]
        for rank in range(len(programs))
    ]


def _by_phase(program: Program) -> dict[Phase, Program]:
    """The backward begins with the first of its work."""
    works = (
        index for index, step in enumerate(program) if isinstance(step, Work) and step.phase == "backward"
    )
    backward = next(works, len(program))
    return {"forward": program[:backward], "backward": program[backward:]}


def turned(programs: Sequence[Program]) -> list[Program]:
    """Rank r does what rank R - 1 - r did, with the neighbours that follow from it."""
    last = len(programs) - 1
    return [[_mirrored(step, last) for step in program] for program in reversed(programs)]


def _mirrored(step: Step, last: int) -> Step:
    if isinstance(step, Work):
        return step
    if isinstance(step, Send):
        return Send(last - step.to, step.name, step.bytes)
    if isinstance(step, Receive):
        return Receive(last - step.source, step.name)
    members = tuple(sorted(last - member for member in step.members))
    return Begin(step.name, step.seconds, members) if isinstance(step, Begin) else End(step.name, members)


def _of_micro_batch(step: Step, number: int) -> Step:
    """Messages and collectives name theirs: the replay refuses one that comes to another."""
    if isinstance(step, Work):
        return step
    name = f"{step.name} of micro-batch {number}"
    if isinstance(step, Send):
        return Send(step.to, name, step.bytes)
    if isinstance(step, Receive):
        return Receive(step.source, name)
    return Begin(name, step.seconds, step.members) if isinstance(step, Begin) else End(name, step.members)
