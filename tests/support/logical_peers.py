"""`Peers` among the logical ranks of one process."""

from dataclasses import dataclass
from queue import Empty, Queue

from torch import Tensor

Message = tuple[str, tuple[Tensor, ...]]


class LogicalPeers:
    """One for all ranks; `of(rank)` is what a rank holds."""

    def __init__(self, ranks: int, timeout_seconds: float = 60.0) -> None:
        self._ways: dict[tuple[int, int], Queue[Message]] = {
            (source, to): Queue() for source in range(ranks) for to in range(ranks)
        }
        self._timeout_seconds = timeout_seconds

    def of(self, rank: int) -> "QueuePeers":
        return QueuePeers(self._ways, rank, self._timeout_seconds)


class QueuePeers:
    """Sends copy and return at once, receives check what arrives."""

    def __init__(
        self, ways: "dict[tuple[int, int], Queue[Message]]", rank: int, timeout_seconds: float
    ) -> None:
        self.sent: list[tuple[int, str, int]] = []  # (to, name, bytes) of every message
        self._ways, self._rank, self._timeout_seconds = ways, rank, timeout_seconds

    def send_to(self, rank: int, name: str, tensors: tuple[Tensor, ...]) -> None:
        self.put(rank, name, tensors)

    def swap_with(self, rank: int, name: str, tensors: tuple[Tensor, ...]) -> "Swapped":
        self.put(rank, name, tensors)
        return Swapped(self, rank)

    def put(self, rank: int, name: str, tensors: tuple[Tensor, ...]) -> None:
        self.sent.append((rank, name, sum(tensor.nbytes for tensor in tensors)))
        self._ways[self._rank, rank].put((name, tuple(tensor.detach().clone() for tensor in tensors)))

    def receive_from(self, rank: int, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        try:
            arrived_name, arrived = self._ways[rank, self._rank].get(timeout=self._timeout_seconds)
        except Empty:
            raise TimeoutError(f"{name}: nothing came from rank {rank}") from None
        assert arrived_name == name, f"wanted {name}, got {arrived_name}"
        got = [(tuple(tensor.shape), tensor.dtype) for tensor in arrived]
        wanted = [(tuple(tensor.shape), tensor.dtype) for tensor in like]
        assert got == wanted, f"{name}: wanted {wanted}, got {got}"
        return arrived


@dataclass(frozen=True)
class Swapped:
    """What comes from a rank for what went there."""

    peers: QueuePeers
    rank: int

    def take(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.peers.receive_from(self.rank, name, like)
