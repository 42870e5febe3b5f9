"""Messages between the halves of the ranks while a pair of micro-batches goes over them from both ends."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from parallel.mesh import Mesh
from parallel.sequence.context import Exchange
from parallel.sequence.node import Peers

Like = tuple[Tensor, ...]


class Transport(Exchange, Peers, Protocol):
    """Between neighbours and between any two ranks of a row."""


class Meeting:
    """What a rank has for the other half of the ranks until that takes it.

    Each half forwards first what begins at its end: both have sent a whole forward before either receives. On
    a GPU a message that nobody takes may hold up all that was started after it, the messages from over there
    too: both would wait for ever. So sends to the other half are held back while a pair is `open`. Both hand
    over, one message for one, where they receive: the first half gives before it takes, the second one after.
    """

    def __init__(self, in_first_half: bool) -> None:
        self._in_first_half = in_first_half
        self._held: dict[int, deque[Callable[[], None]]] = {}  # by world rank of the one who takes
        self._is_open = False

    def open(self) -> None:
        self._is_open = True

    def settle(self) -> None:
        """After both forwards of a pair, or both backwards: what was not handed over yet goes now."""
        for held in self._held.values():
            while held:
                held.popleft()()

    def close(self) -> None:
        self._is_open = False

    def send(self, to: int, tensors: Like, send: Callable[[Like], None]) -> None:
        if not self._is_open:
            send(tensors)
            return
        copies = tuple(one.detach().clone() for one in tensors)  # the caller may write into its own
        self._held.setdefault(to, deque()).append(lambda: send(copies))

    def receive(self, source: int, take: Callable[[], Like]) -> Like:
        held = self._held.get(source)
        if held and self._in_first_half:
            held.popleft()()
        taken = take()
        if held and not self._in_first_half:
            held.popleft()()
        return taken


class MeetingExchange:
    """The `Exchange` and the `Peers` of one way over the ranks, whose two halves meet."""

    def __init__(
        self, transport: Transport, meeting: Meeting, mesh: Mesh, is_across: Callable[[int], bool]
    ) -> None:
        """is_across: whether a world rank of this row is in the other half."""
        self._transport, self._meeting, self._mesh, self._is_across = transport, meeting, mesh, is_across
        self.has_previous, self.has_next = transport.has_previous, transport.has_next

    def send_next(self, name: str, tensors: Like) -> None:
        self._send(self._mesh.sequence_rank + 1, tensors, lambda held: self._transport.send_next(name, held))

    def send_previous(self, name: str, tensors: Like) -> None:
        place = self._mesh.sequence_rank - 1
        self._send(place, tensors, lambda held: self._transport.send_previous(name, held))

    def receive_next(self, name: str, like: Like) -> Like:
        place = self._mesh.sequence_rank + 1
        return self._receive(place, lambda: self._transport.receive_next(name, like))

    def receive_previous(self, name: str, like: Like) -> Like:
        place = self._mesh.sequence_rank - 1
        return self._receive(place, lambda: self._transport.receive_previous(name, like))

    def send_to(self, rank: int, name: str, tensors: Like) -> None:
        self._send(rank, tensors, lambda held: self._transport.send_to(rank, name, held))

    def receive_from(self, rank: int, name: str, like: Like) -> Like:
        return self._receive(rank, lambda: self._transport.receive_from(rank, name, like))

    def _send(self, place: int, tensors: Like, send: Callable[[Like], None]) -> None:
        other = self._mesh.global_rank(place)
        if self._is_across(other):
            self._meeting.send(other, tensors, send)
        else:
            send(tensors)

    def _receive(self, place: int, take: Callable[[], Like]) -> Like:
        other = self._mesh.global_rank(place)
        return self._meeting.receive(other, take) if self._is_across(other) else take()
