"""The part of every sequence that this rank holds, and the context its layers get."""

import torch
from torch import Tensor

from parallel.mesh import Mesh
from parallel.sequence.context import SequenceContext, WholeSequence
from parallel.sequence.exchange import RankExchange
from parallel.sequence.ranks import RankedSequence
from parallel.sequence.shard import equal_shards


class SequenceSplit:
    """Tokens [start, stop) of each sequence of `sequence_length` tokens belong to this rank."""

    def __init__(self, mesh: Mesh, sequence_length: int, position_multiple: int) -> None:
        self.mesh = mesh
        self.sequence_length = sequence_length
        self.device: torch.device = mesh.world.device
        self.shards = [(0, sequence_length)]
        self._exchange: RankExchange | None = None
        if mesh.sequence_size > 1:
            self.shards = equal_shards(sequence_length, mesh.sequence_size, position_multiple)
            self._exchange = RankExchange(mesh)
        self.start, self.stop = self.shards[mesh.sequence_rank]

    def local(self, tokens: Tensor) -> Tensor:
        """[b, T] of the whole sequence -> [b, stop - start] of this rank, on its device."""
        return tokens[:, self.start : self.stop].to(self.device)

    def context(self) -> SequenceContext:
        """A fresh context for one forward."""
        if self._exchange is None:
            return WholeSequence()
        return RankedSequence(self.mesh, self.start, self._exchange)

    def drain(self) -> None:
        """Wait until every message that this rank sent has left."""
        if self._exchange is not None:
            self._exchange.drain()
