"""`AllToAll` between the logical ranks of one process."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from parallel.config import NodeSplits
from parallel.sequence.all_to_all import Part
from parallel.sequence.node import Node
from tests.support.logical_peers import LogicalPeers, QueuePeers


class LogicalRow:
    """Ranks that swap with each other; `rank(r)` is what rank r holds."""

    def __init__(self, ranks: int, timeout_seconds: float = 60.0) -> None:
        self._peers, self._ranks = LogicalPeers(ranks, timeout_seconds), range(ranks)

    def rank(self, rank: int) -> "LogicalAllToAll":
        return LogicalAllToAll(self._peers.of(rank), rank, self._ranks)


@dataclass(frozen=True)
class LogicalAllToAll:
    """As messages of `peers`, which has a log of them. members: sequence ranks, `rank` one of them.

    sent: name and bytes to other ranks of every swap.
    """

    peers: QueuePeers
    rank: int
    members: range
    sent: list[tuple[str, int]] = field(default_factory=list)

    def start(self, name: str, parts: Sequence[Part], like: Sequence[Part]) -> "_InFlight":
        others = [
            (member, part) for member, part in zip(self.members, parts, strict=True) if member != self.rank
        ]
        self.sent.append((name, sum(one.nbytes for _, part in others for one in part)))
        for member, part in others:
            self.peers.send_to(member, name, part)
        own = tuple(one.detach().clone() for one in parts[self.members.index(self.rank)])
        return _InFlight(self, name, own, tuple(like))


@dataclass
class _InFlight:
    over: LogicalAllToAll
    name: str
    own: Part
    like: tuple[Part, ...]
    landed: bool = False

    def land(self) -> list[Part]:
        assert not self.landed, f"{self.name}: lands once"
        self.landed = True
        over = self.over
        return [
            self.own if member == over.rank else over.peers.receive_from(member, self.name, like)
            for member, like in zip(over.members, self.like, strict=True)
        ]


def logical_node(
    peers: QueuePeers, rank: int, size: int, spans: Sequence[tuple[int, int]], splits: NodeSplits = "operator"
) -> Node:
    """The node of a logical rank: what members swap is in the log of `peers` too."""
    first = rank - rank % size
    members = LogicalAllToAll(peers, rank, range(first, first + size))
    return Node(peers, members, rank, size, tuple(spans), splits)
