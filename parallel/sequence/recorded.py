"""What a rank sent and received: a transport that keeps a log, and one that needs no neighbours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parallel.sequence.context import Exchange

Operation = Literal["send", "receive"]
Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Message:
    """One end of one message. Ranks are sequence ranks; `number` counts the operations of this rank.

    bytes: of the tensors, without the transport's alignment and labels. A message between r and r + 1 is
    number i of its phase on both, so that two logs can be joined.
    """

    number: int
    operation: Operation
    source: int
    to: int
    name: str
    phase: Phase
    bytes: int

    @property
    def rank(self) -> int:
        """Whose log this is in."""
        return self.source if self.operation == "send" else self.to

    @property
    def layer(self) -> int | None:
        """The leading number of the name; None where the layer gave none."""
        number = self.name.split(".", 1)[0]
        return int(number) if number.isdigit() else None


class RecordedExchange:
    """An `Exchange` that passes everything to another and logs it in `messages`.

    A send is logged before it is handed over, a receive once it has arrived.
    """

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange = exchange
        self.rank = rank
        self.has_previous, self.has_next = exchange.has_previous, exchange.has_next
        self.messages: list[Message] = []

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._log("send", self.rank, self.rank + 1, name, "forward", tensors)
        self.exchange.send_next(name, tensors)

    def send_previous(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._log("send", self.rank, self.rank - 1, name, "backward", tensors)
        self.exchange.send_previous(name, tensors)

    def receive_previous(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        received = self.exchange.receive_previous(name, like)
        self._log("receive", self.rank - 1, self.rank, name, "forward", received)
        return received

    def receive_next(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        received = self.exchange.receive_next(name, like)
        self._log("receive", self.rank + 1, self.rank, name, "backward", received)
        return received

    def sent(self, phase: Phase) -> list[Message]:
        return [one for one in self.messages if one.operation == "send" and one.phase == phase]

    def received(self, phase: Phase) -> list[Message]:
        return [one for one in self.messages if one.operation == "receive" and one.phase == phase]

    def _log(
        self, operation: Operation, source: int, to: int, name: str, phase: Phase, tensors: tuple[Tensor, ...]
    ) -> None:
        size = sum(tensor.nbytes for tensor in tensors)
        self.messages.append(Message(len(self.messages), operation, source, to, name, phase, size))


class ZeroExchange:
    """Neighbours that take all and send zeros: one of many ranks runs alone, to be counted or timed."""

    def __init__(self, *, has_previous: bool, has_next: bool) -> None:
        self.has_previous, self.has_next = has_previous, has_next

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        assert self.has_next, f"{name}: no next rank"

    def send_previous(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        assert self.has_previous, f"{name}: no previous rank"

    def receive_previous(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self.has_previous, f"{name}: no previous rank"
        return _zeros(like)

    def receive_next(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self.has_next, f"{name}: no next rank"
        return _zeros(like)


def _zeros(like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in like)


def longest_chain(logs: Sequence[Sequence[Message]]) -> int:
    """The most messages of which each could only leave once the one before it had arrived.

    logs: of every rank, in rank order and complete. Raises ValueError if a message has no partner.
    """
    chains = [0] * len(logs)  # the longest that has reached each rank
    carried: dict[tuple[int, int], list[int]] = {}  # (source, to) -> chains of the messages on their way
    at = [0] * len(logs)
    moved = True
    while moved:
        moved = False
        for rank, log in enumerate(logs):
            while at[rank] < len(log):
                message = log[at[rank]]
                way = carried.setdefault((message.source, message.to), [])
                if message.operation == "send":
                    way.append(chains[rank] + 1)
                elif way:
                    chains[rank] = max(chains[rank], way.pop(0))
                else:
                    break
                at[rank] += 1
                moved = True
    _check_partners(logs, at, carried)
    return max(chains, default=0)


def _check_partners(
    logs: Sequence[Sequence[Message]], at: list[int], carried: dict[tuple[int, int], list[int]]
) -> None:
    for log, reached in zip(logs, at, strict=True):
        if reached < len(log):
            raise ValueError(f"{log[reached]} was never sent; the logs of all ranks of one run are needed")
    for (source, to), left in carried.items():
        if left:
            raise ValueError(f"{len(left)} messages from rank {source} to rank {to} were never received")
