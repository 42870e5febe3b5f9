"""The context of one shard of a sequence that lives on several ranks."""

from typing import Any

from torch import Tensor

from parallel.mesh import Mesh
from parallel.sequence.context import Exchange
from parallel.sequence.halo import exchange_halo
from parallel.sequence.relay import receive_state, send_state


class RankedSequence:
    """`SequenceContext` of the shard that begins at `start`; one per forward, over one shared exchange."""

    keeps_state = False

    def __init__(self, mesh: Mesh, start: int, exchange: Exchange) -> None:
        if (start == 0) != (mesh.sequence_rank == 0):
            raise ValueError(
                f"sequence rank {mesh.sequence_rank} got start={start}: the first rank starts at 0, no other"
            )
        self.start = start
        self.exchange = exchange

    def halo(self, name: str, tensors: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
        return exchange_halo(self.exchange, name, tensors, count, self.start)

    def receive(self, name: str, zeros: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return receive_state(self.exchange, name, zeros)

    def send(self, name: str, state: tuple[Tensor, ...], tie: Tensor) -> Tensor:
        return send_state(self.exchange, name, state, tie)

    def load(self, name: str) -> Any:
        return None

    def store(self, name: str, state: Any) -> None:
        pass
