"""When everything in a step starts and ends, given what takes how long and what waits for what. No torch.

A rank does one thing at a time, in the order of its program. A wire, one for each direction between two
ranks, carries one message at a time, and the same ranks have one collective at a time. Everything starts as
soon as all that it waits for has ended.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvm_dist.bench.scaling.collectives import Collectives
from kvm_dist.bench.scaling.program import Begin, End, Link, Program, Receive, Send, Step, Work


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds from the start of the step."""

    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """of_rank: what each rank computed, and when; ends: when each was done."""

    of_rank: list[list[tuple[Work, Span]]]
    ends: list[float]

    @property
    def seconds(self) -> float:
        return max(self.ends, default=0.0)

    def busy_seconds(self, rank: int) -> float:
        """Time this rank computes."""
        return sum(span.end - span.start for _, span in self.of_rank[rank])


def replay(programs: Sequence[Program], link: Link) -> Timeline:
    """The step in which rank r runs programs[r], joined by `link`.

    Messages between two ranks are matched by their order. Raises ValueError if one has no partner or another
    name on the other side, if collectives do not match or are begun and not ended, or if ranks wait for each
    other in a circle.
    """
    ranks = [_Rank(number, program) for number, program in enumerate(programs)]
    step = _Running(ranks, link, Collectives(len(ranks)))
    ready = deque(ranks)
    while ready:
        rank = ready.popleft()
        rank.queued = False
        for woken in step.advance(rank):
            if not woken.queued:
                woken.queued = True
                ready.append(woken)
    step.check_ended()
    return Timeline([rank.worked for rank in ranks], [rank.now for rank in ranks])


@dataclass(eq=False)
class _Rank:
    number: int
    program: Program
    at: int = 0  # the step it has come to
    now: float = 0.0
    queued: bool = True  # to go on from where it is
    worked: list[tuple[Work, Span]] = field(default_factory=list)

    @property
    def waits_at(self) -> Step | None:
        """The step that it has come to, None at the end."""
        return self.program[self.at] if self.at < len(self.program) else None


@dataclass
class _Running:
    """Messages on their way: (source, to) -> name, bytes, arrival; who waits; when each wire is free."""

    ranks: list[_Rank]
    link: Link
    collectives: Collectives
    sent: dict[tuple[int, int], deque[tuple[str, int, float]]] = field(default_factory=dict)
    free: dict[tuple[int, int], float] = field(default_factory=dict)
    costs: dict[tuple[tuple[int, int], int], tuple[float, float, float, float]] = field(default_factory=dict)

    def advance(self, rank: _Rank) -> list[_Rank]:
        """Run a rank until it waits or ends; returns those that need no longer wait for it."""
        woken: list[_Rank] = []
        program, length = rank.program, len(rank.program)
        while rank.at < length:
            step = program[rank.at]
            if isinstance(step, Work):
                start, rank.now = rank.now, rank.now + step.seconds
                rank.worked.append((step, Span(start, rank.now)))
            elif isinstance(step, Send):
                woken += self._send(rank, step)
            elif isinstance(step, Receive):
                if not self._receive(rank, step):
                    return woken
            elif isinstance(step, Begin):
                woken += self._begin(rank, step)
            elif not self._end(rank, step):
                return woken
            rank.at += 1
        return woken

    def _send(self, rank: _Rank, step: Send) -> list[_Rank]:
        way = (rank.number, step.to)
        sender, wire, latency, _ = self._costs(way, step.bytes)
        rank.now += sender
        free = max(self.free.get(way, 0.0), rank.now) + wire
        self.free[way] = free
        self.sent.setdefault(way, deque()).append((step.name, step.bytes, free + latency))
        waits = (to := self.ranks[step.to]).waits_at
        return [to] if isinstance(waits, Receive) and waits.source == rank.number else []

    def _receive(self, rank: _Rank, step: Receive) -> bool:
        queue = self.sent.get((step.source, rank.number))
        if not queue:
            return False
        name, size, arrival = queue.popleft()
        if name != step.name:
            raise ValueError(
                f"rank {rank.number} waits for {step.name!r} but rank {step.source} sends {name!r}"
            )
        rank.now = max(rank.now, arrival) + self._costs((step.source, rank.number), size)[3]
        return True

    def _costs(self, way: tuple[int, int], size: int) -> tuple[float, float, float, float]:
        """Of a message: of the sender, of the wire, until it is there, of the receiver. Few ways and sizes
        make millions of messages."""
        found = self.costs.get((way, size))
        if found is None:
            link = self.link
            found = self.costs[way, size] = (
                link.sender_seconds(*way, size),
                link.wire_seconds(*way, size),
                link.latency_seconds(*way),
                link.receiver_seconds(*way, size),
            )
        return found

    def _begin(self, rank: _Rank, step: Begin) -> list[_Rank]:
        members = [self.ranks[number] for number in self.collectives.begin(rank.number, rank.now, step)]
        return [one for one in members if one is not rank and isinstance(one.waits_at, End)]

    def _end(self, rank: _Rank, step: End) -> bool:
        end = self.collectives.end(rank.number, step)
        if end is None:
            return False
        rank.now = max(rank.now, end)
        return True

    def check_ended(self) -> None:
        for rank in self.ranks:
            if rank.at < len(rank.program):
                raise ValueError(f"rank {rank.number} waits forever at {rank.program[rank.at]}")
        for (source, to), queue in self.sent.items():
            if queue:
                raise ValueError(f"rank {to} never receives {queue[0][0]!r} from rank {source}")
        self.collectives.check_ended()
