"""Programs of a step of several micro-batches, all in one direction along the ranks or in turns. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvm_dist.bench.scaling.program import Begin, End, Program, Receive, Send, Step, Work


@dataclass(frozen=True)
class Accumulation:
    """Of a step. alternate: every second micro-batch begins on the last rank."""

    micro_batches: int = 1
    alternate: bool = False

    @property
    def label(self) -> str:
        how = " in turns" if self.alternate else ""
        return f"{self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}{how}"


def accumulated(programs: Sequence[Program], accumulation: Accumulation) -> list[Program]:
    """programs: of one micro-batch."""
    if accumulation.micro_batches == 1:
        return list(programs)
    ways = (programs, turned(programs)) if accumulation.alternate else (programs,)
    numbers = range(accumulation.micro_batches)
    return [
        [_of_micro_batch(step, number) for number in numbers for step in ways[number % len(ways)][rank]]
        for rank in range(len(programs))
    ]


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
