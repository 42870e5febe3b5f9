"""What each rank does in a step, in its order. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Work:
    """Computing. layer: None outside of layers."""

    name: str
    seconds: float
    phase: str = "forward"
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """A message to rank `to`; the sender goes on at once."""

    to: int
    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Waits for the message from rank `source`."""

    source: int
    name: str


@dataclass(frozen=True, slots=True)
class Begin:
    """A collective of `members`, all ranks if empty, beside which they go on until they come to its `End`.

    It starts once the last member has begun it and those that the same members began before have ended.
    """

    name: str
    seconds: float
    members: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """Waits until the collective is done."""

    name: str
    members: tuple[int, ...] = ()


def collective(name: str, seconds: float, members: tuple[int, ...] = ()) -> tuple[Begin, End]:
    """One that holds its members until it is done."""
    return Begin(name, seconds, members), End(name, members)


Step = Work | Send | Receive | Begin | End
Program = Sequence[Step]


class Link(Protocol):
    """What a message costs: time of the sender, of the wire, until it is there, and of the receiver."""

    def sender_seconds(self, source: int, to: int, size: int) -> float: ...

    def wire_seconds(self, source: int, to: int, size: int) -> float: ...

    def latency_seconds(self, source: int, to: int) -> float: ...

    def receiver_seconds(self, source: int, to: int, size: int) -> float: ...
