"""Messages between the halves of the ranks while a pair of micro-batches goes over them from both ends."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from parallel.mesh import Mesh
from parallel.sequence.context import Exchange
from parallel.sequence.node import Peers

Tensors = tuple[Tensor, ...]


class Arrival(Protocol):
    """What comes for what went."""

    def take(self, name: str, like: Tensors) -> Tensors:
        """Wait for it. name, like: of the message that it has to be."""
        ...


class Transport(Exchange, Peers, Protocol):
    """Between neighbours and between any two ranks of a row."""

    def swap_with(self, rank: int, name: str, tensors: Tensors) -> Arrival:
        """Start to send to a sequence rank and to receive tensors of the same shapes from it, as one
        operation: neither waits in line behind a message that the other has not taken."""
        ...


class Meeting:
    """What has come from the other half of the ranks for a micro-batch that this rank has not come to.

    Each half forwards first what begins at its end: both have sent a whole forward before either receives. On
    a GPU a message that nobody takes may hold up all that was started after it, the messages from over there
    too: both would wait for ever. While a pair is open, message k to the other half therefore goes in one
    operation with its message k to this one. They are of the same layer and edge: the ranks at the middle
    have mirror images of the same shards.
    """

    def __init__(self) -> None:
        self._arrivals: dict[int, deque[Arrival]] = {}  # by world rank that sent them
        self._is_open = False

    def open(self) -> None:
        self._is_open = True

    def close(self) -> None:
        """Raises ValueError if something came that no layer wanted."""
        self._is_open = False
        if left := {rank: len(arrivals) for rank, arrivals in self._arrivals.items() if arrivals}:
            raise ValueError(f"messages from the other half that nobody took, by rank: {left}")

    def send(self, to: int, swap: Callable[[], Arrival], send: Callable[[], None]) -> None:
        if self._is_open:
            self._arrivals.setdefault(to, deque()).append(swap())
        else:
            send()

    def receive(self, source: int, name: str, like: Tensors, receive: Callable[[], Tensors]) -> Tensors:
        arrivals = self._arrivals.get(source)
        return arrivals.popleft().take(name, like) if arrivals else receive()


class MeetingExchange:
    """The `Exchange` and the `Peers` of one way over the ranks, whose two halves meet."""

    def __init__(
        self, transport: Transport, meeting: Meeting, mesh: Mesh, is_across: Callable[[int], bool]
    ) -> None:
        """is_across: whether a world rank of this row is in the other half."""
        self._transport, self._meeting, self._mesh, self._is_across = transport, meeting, mesh, is_across
        self.has_previous, self.has_next = transport.has_previous, transport.has_next

    def send_next(self, name: str, tensors: Tensors) -> None:
        self._send(1, name, tensors, lambda: self._transport.send_next(name, tensors))

    def send_previous(self, name: str, tensors: Tensors) -> None:
        self._send(-1, name, tensors, lambda: self._transport.send_previous(name, tensors))

    def receive_next(self, name: str, like: Tensors) -> Tensors:
        return self._receive(1, name, like, lambda: self._transport.receive_next(name, like))

    def receive_previous(self, name: str, like: Tensors) -> Tensors:
        return self._receive(-1, name, like, lambda: self._transport.receive_previous(name, like))

    def send_to(self, rank: int, name: str, tensors: Tensors) -> None:
        distance = rank - self._mesh.sequence_rank
        self._send(distance, name, tensors, lambda: self._transport.send_to(rank, name, tensors))

    def receive_from(self, rank: int, name: str, like: Tensors) -> Tensors:
        distance = rank - self._mesh.sequence_rank
        return self._receive(distance, name, like, lambda: self._transport.receive_from(rank, name, like))

    def _send(self, distance: int, name: str, tensors: Tensors, send: Callable[[], None]) -> None:
        place = self._mesh.sequence_rank + distance
        other = self._mesh.global_rank(place)
        if self._is_across(other):
            self._meeting.send(other, lambda: self._transport.swap_with(place, name, tensors), send)
        else:
            send()

    def _receive(self, distance: int, name: str, like: Tensors, receive: Callable[[], Tensors]) -> Tensors:
        other = self._mesh.global_rank(self._mesh.sequence_rank + distance)
        return self._meeting.receive(other, name, like, receive) if self._is_across(other) else receive()
