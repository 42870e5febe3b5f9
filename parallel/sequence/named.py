"""Names of messages that say who sends them, and of which micro-batch they are."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from parallel.sequence.all_to_all import AllToAll, Flight, Part
from parallel.sequence.context import Exchange, HeadSplit
from parallel.sequence.node import Peers


class _Naming:
    def __init__(self, prefix: str, suffix: str) -> None:
        self._before = f"{prefix}." if prefix else ""
        self._after = f" {suffix}" if suffix else ""

    def __call__(self, name: str) -> str:
        return f"{self._before}{name}{self._after}"


class NamedExchange:
    """An `Exchange` that puts `prefix.` before every name and ` suffix` after it: several senders over one
    exchange are told apart, in errors, in logs, and where the order of messages is checked."""

    def __init__(self, exchange: Exchange, prefix: str = "", suffix: str = "") -> None:
        self._exchange = exchange
        self._named = _Naming(prefix, suffix)
        self.has_previous, self.has_next = exchange.has_previous, exchange.has_next

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._exchange.send_next(self._named(name), tensors)

    def receive_previous(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._exchange.receive_previous(self._named(name), like)

    def send_previous(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._exchange.send_previous(self._named(name), tensors)

    def receive_next(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._exchange.receive_next(self._named(name), like)


class NamedPeers:
    """The same for `Peers`."""

    def __init__(self, peers: Peers, prefix: str = "", suffix: str = "") -> None:
        self._peers = peers
        self._named = _Naming(prefix, suffix)

    def send_to(self, rank: int, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._peers.send_to(rank, self._named(name), tensors)

    def receive_from(self, rank: int, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._peers.receive_from(rank, self._named(name), like)


class NamedAllToAll:
    """The same for `AllToAll`."""

    def __init__(self, all_to_all: AllToAll, prefix: str = "", suffix: str = "") -> None:
        self._all_to_all = all_to_all
        self._named = _Naming(prefix, suffix)

    def start(self, name: str, parts: Sequence[Part], like: Sequence[Part]) -> Flight:
        return self._all_to_all.start(self._named(name), parts, like)


def named_split(split: HeadSplit, prefix: str = "", suffix: str = "") -> HeadSplit:
    """`split` whose node names its messages so."""
    if split.node is None:
        return split
    peers = NamedPeers(split.node.peers, prefix, suffix)
    all_to_all = NamedAllToAll(split.node.all_to_all, prefix, suffix)
    return replace(split, node=replace(split.node, peers=peers, all_to_all=all_to_all))
