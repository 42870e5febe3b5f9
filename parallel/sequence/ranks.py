"""The context of one shard of a sequence that lives on several ranks."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from parallel.mesh import Mesh
from parallel.sequence.all_to_all import AllToAll
from parallel.sequence.chain import attend_by_chain
from parallel.sequence.context import CausalAttention, Exchange, HeadSplit
from parallel.sequence.halo import exchange_halo
from parallel.sequence.heads import HeadRanks, attend_by_heads
from parallel.sequence.relay import receive_state, send_state


class RankedSequence:
    """`SequenceContext` of the shard that begins at `start`; one per forward, over one shared exchange.

    spans: [start, stop) of every rank, which attention to all tokens needs. It swaps heads over `all_to_all`
    where that is given and the ranks divide the heads; else keys and values go from rank to rank.
    """

    keeps_state = False

    def __init__(
        self,
        mesh: Mesh,
        start: int,
        exchange: Exchange,
        spans: Sequence[tuple[int, int]] = (),
        all_to_all: AllToAll | None = None,
        head_split: HeadSplit = HeadSplit(),  # noqa: B008
    ) -> None:
        if (start == 0) != (mesh.sequence_rank == 0):
            raise ValueError(
                f"sequence rank {mesh.sequence_rank} got start={start}: the first rank starts at 0, no other"
            )
        self.start = start
        self.exchange = exchange
        self.head_split = head_split
        self._rank = mesh.sequence_rank
        self._lengths = [stop - start for start, stop in spans]
        self._all_to_all = all_to_all

    def halo(
        self, name: str, tensors: tuple[Tensor, ...], count: int, keep: int | None = None
    ) -> tuple[Tensor, ...]:
        return exchange_halo(self.exchange, name, tensors, count, self.start)

    def attend(
        self, name: str, attention: CausalAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        before, own = self._lengths[: self._rank], self._lengths[self._rank : self._rank + 1]
        if sum(before) != self.start or own != [query.shape[1]]:
            raise ValueError(
                f"{name}: {query.shape[1]} tokens from {self.start} on as shard {self._rank} of lengths "
                f"{self._lengths}; give the context the spans of all ranks"
            )
        if self._all_to_all is not None and query.shape[2] % len(self._lengths) == 0:
            ranks = HeadRanks(self._all_to_all, self._rank, tuple(self._lengths), query.shape[2])
            return attend_by_heads(ranks, name, attention, query, key, value)
        return attend_by_chain(self.exchange, name, attention, before, query, key, value)

    def receive(self, name: str, zeros: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return receive_state(self.exchange, name, zeros)

    def send(self, name: str, state: tuple[Tensor, ...], tie: Tensor) -> Tensor:
        return send_state(self.exchange, name, state, tie)

    def load(self, name: str) -> Any:
        return None

    def store(self, name: str, state: Any) -> None:
        pass
