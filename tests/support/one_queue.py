"""Logical ranks whose messages are kernels that a GPU runs one after the other, in the order of their start.

Two streams of a GPU need not make progress at once: a message that nobody takes may hold up all that was
started after it. Ranks that do not wait for each other in a circle here do so nowhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from queue import Queue
from typing import Any

import pytest
from torch import Tensor

from parallel.sequence.all_to_all import Part
from tests.support.logical_all_to_all import LogicalAllToAll
from tests.support.logical_peers import QueuePeers
from tests.support.logical_ranks import QueueExchange

SILENCE_SECONDS = 20.0


def one_queue(patched: pytest.MonkeyPatch, silence_seconds: float = SILENCE_SECONDS) -> None:
    """From here on sends end once they are taken, and swaps once all ranks have begun them."""
    send_raw, take = QueuePeers.send_to, QueuePeers.receive_from
    receive = QueueExchange._receive

    def send(self: QueueExchange, direction: str, name: str, tensors: tuple[Tensor, ...], queue: Any) -> None:
        self.sent.append((direction, name, sum(tensor.nbytes for tensor in tensors)))
        queue.put((name, tuple(tensor.detach().clone() for tensor in tensors)))
        _wait_until_taken(queue, name, silence_seconds)

    def received(self: QueueExchange, name: str, like: tuple[Tensor, ...], queue: Any) -> tuple[Tensor, ...]:
        found = receive(self, name, like, queue)
        queue.task_done()
        return found

    def send_to(self: QueuePeers, rank: int, name: str, tensors: tuple[Tensor, ...]) -> None:
        send_raw(self, rank, name, tensors)
        _wait_until_taken(self._ways[self._rank, rank], name, silence_seconds)

    def receive_from(self: QueuePeers, rank: int, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        found = take(self, rank, name, like)
        self._ways[rank, self._rank].task_done()
        return found

    def swap_with(self: QueuePeers, rank: int, name: str, tensors: tuple[Tensor, ...]) -> "_Taken":
        self.put(rank, name, tensors)
        came = self._ways[rank, self._rank].get(timeout=silence_seconds)
        self._ways[rank, self._rank].task_done()
        return _Taken(*came)

    def start(self: LogicalAllToAll, name: str, parts: Sequence[Part], like: Sequence[Part]) -> _Landed:
        for member, part in zip(self.members, parts, strict=True):
            if member != self.rank:
                send_raw(self.peers, member, name, part)
        own = tuple(one.detach().clone() for one in parts[self.members.index(self.rank)])
        return _Landed(
            [
                own if member == self.rank else self.peers.receive_from(member, name, one)
                for member, one in zip(self.members, like, strict=True)
            ]
        )

    patched.setattr(QueueExchange, "_send", send)
    patched.setattr(QueueExchange, "_receive", received)
    patched.setattr(QueuePeers, "send_to", send_to)
    patched.setattr(QueuePeers, "receive_from", receive_from)
    patched.setattr(QueuePeers, "swap_with", swap_with)
    patched.setattr(LogicalAllToAll, "start", start)


@dataclass(frozen=True)
class _Taken:
    name: str
    tensors: tuple[Tensor, ...]

    def take(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert name == self.name, f"wanted {name}, got {self.name}"
        got, wanted = ([(one.shape, one.dtype) for one in each] for each in (self.tensors, like))
        assert got == wanted, f"{name}: wanted {wanted}, got {got}"
        return self.tensors


@dataclass(frozen=True)
class _Landed:
    parts: list[Part]

    def land(self) -> list[Part]:
        return self.parts


def _wait_until_taken(queue: "Queue[Any]", name: str, silence_seconds: float) -> None:
    with queue.all_tasks_done:
        if not queue.all_tasks_done.wait_for(lambda: queue.unfinished_tasks == 0, silence_seconds):
            raise TimeoutError(f"{name}: nobody takes it")
