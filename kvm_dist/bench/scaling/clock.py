"""A transport that also keeps the time, and wires between logical ranks that take turns in one process."""

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from parallel.sequence.context import Exchange
from parallel.sequence.recorded import Message, RecordedExchange


@dataclass(frozen=True)
class Event:
    """One message as its rank saw it. start, stop: of the call, in seconds of this process's clock."""

    start: float
    stop: float
    operation: str
    source: int
    to: int
    name: str
    phase: str
    layer: int | None
    bytes: int

    @classmethod
    def of(cls, message: Message, start: float, stop: float) -> "Event":
        return cls(
            start,
            stop,
            message.operation,
            message.source,
            message.to,
            message.name,
            message.phase,
            message.layer,
            message.bytes,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class ClockedExchange(RecordedExchange):
    """Logs when each send was called and returned, and how long each receive waited."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        super().__init__(exchange, rank)
        self.calls: list[tuple[float, float]] = []

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        start = time.perf_counter()
        super().send_next(name, tensors)
        self._called(start)

    def send_previous(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        start = time.perf_counter()
        super().send_previous(name, tensors)
        self._called(start)

    def receive_previous(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        start = time.perf_counter()
        received = super().receive_previous(name, like)
        self._called(start)
        return received

    def receive_next(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        start = time.perf_counter()
        received = super().receive_next(name, like)
        self._called(start)
        return received

    def events(self) -> list[Event]:
        return [Event.of(one, *call) for one, call in zip(self.messages, self.calls, strict=True)]

    def _called(self, start: float) -> None:
        self.calls.append((start, time.perf_counter()))


Wires = dict[tuple[int, int], deque[tuple[Tensor, ...]]]  # (source, to) -> messages on their way


class TurnExchange:
    """The `Exchange` of logical rank `rank` of `ranks`, which run one after another in one process.

    Forwards run from the first rank to the last and backwards from the last to the first, so that whatever a
    rank receives has been sent.
    """

    def __init__(self, wires: Wires, rank: int, ranks: int) -> None:
        self._wires = wires
        self._rank = rank
        self.has_previous, self.has_next = rank > 0, rank < ranks - 1

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._send(self._rank + 1, tensors)

    def send_previous(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._send(self._rank - 1, tensors)

    def receive_previous(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._wires[self._rank - 1, self._rank].popleft()

    def receive_next(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._wires[self._rank + 1, self._rank].popleft()

    def _send(self, to: int, tensors: tuple[Tensor, ...]) -> None:
        sent = tuple(tensor.detach().clone() for tensor in tensors)
        self._wires.setdefault((self._rank, to), deque()).append(sent)
