"""Neighbouring sequence ranks that share the work on heads, and hand over as one."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from parallel.config import NodeSplits
from parallel.sequence.all_to_all import AllToAll, Part


class Peers(Protocol):
    """Raw, non-differentiable transport between any two ranks of a sequence.

    Sends return at once, receives block. Messages from one rank to another arrive in the order sent, those of
    an `Exchange` over the same ranks included, and `name` must agree on both sides.
    """

    def send_to(self, rank: int, name: str, tensors: tuple[Tensor, ...]) -> None: ...

    def receive_from(self, rank: int, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tensors of the shapes and dtypes of `like` (whose contents are not read)."""
        ...


@dataclass(frozen=True)
class Node:
    """Member i of a node takes group i of the heads for the tokens of all members.

    peers: between sequence ranks. all_to_all: among the members. rank: this member's sequence rank. spans:
    [start, stop) of every rank. splits: what the members do by heads: the serial part of a forward, or all
    that does not mix heads.
    """

    peers: Peers
    all_to_all: AllToAll
    rank: int
    size: int
    spans: tuple[tuple[int, int], ...]
    splits: NodeSplits = "operator"

    def __post_init__(self) -> None:
        if len(self.spans) % self.size:
            raise ValueError(
                f"parallel.head_parallel={self.size}: does not divide parallel.sequence={len(self.spans)}"
            )

    @property
    def place(self) -> int:
        """This member's number in the node."""
        return self.rank % self.size

    @property
    def members(self) -> range:
        """Sequence ranks."""
        return range(self.rank - self.place, self.rank - self.place + self.size)

    @property
    def start(self) -> int:
        """Position of the node's first token."""
        return self.spans[self.members.start][0]

    @property
    def lengths(self) -> list[int]:
        """Tokens of every member."""
        return [self.spans[member][1] - self.spans[member][0] for member in self.members]

    @property
    def has_previous(self) -> bool:
        return self.members.start > 0

    @property
    def has_next(self) -> bool:
        return self.members.stop < len(self.spans)

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        """To the member of the next node that has the same heads."""
        self.peers.send_to(self.rank + self.size, name, tensors)

    def receive_previous(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.peers.receive_from(self.rank - self.size, name, like)

    def swap(self, name: str, parts: list[Part], like: list[Part]) -> list[Part]:
        """parts: one for each member, itself included. Returns one from each, of the shapes of `like`."""
        return self.all_to_all.start(name, parts, like).land()


class NodeExchange:
    """The `Exchange` between a member of a node and those with the same heads in the nodes beside it."""

    def __init__(self, node: Node) -> None:
        self._peers, self._rank, self._size = node.peers, node.rank, node.size
        self.has_previous, self.has_next = node.has_previous, node.has_next

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._peers.send_to(self._rank + self._size, name, tensors)

    def receive_previous(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._peers.receive_from(self._rank - self._size, name, like)

    def send_previous(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._peers.send_to(self._rank - self._size, name, tensors)

    def receive_next(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._peers.receive_from(self._rank + self._size, name, like)
