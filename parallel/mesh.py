"""The data x sequence grid of ranks, sequence innermost."""

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel.config import ParallelConfig
from parallel.world import World


@dataclass(frozen=True)
class Mesh:
    """This rank's place. Rank = data_rank * sequence_size + sequence_rank, unless `descending`.

    forward, backward: process groups of this row of sequence ranks, one per direction of travel; row: the
    same ranks, for collectives among them; None when sequence_size is 1. node: those of this rank's node,
    None unless parallel.head_parallel has some. timeout_seconds: their longest wait.
    descending: the sequence begins on the last rank of the row, which is sequence rank 0, and ends on the
    first.
    """

    world: World
    data_rank: int
    data_size: int
    sequence_rank: int
    sequence_size: int
    timeout_seconds: float
    forward: dist.ProcessGroup | None = None
    backward: dist.ProcessGroup | None = None
    row: dist.ProcessGroup | None = None
    node: dist.ProcessGroup | None = None
    descending: bool = False

    @classmethod
    def build(cls, world: World, config: ParallelConfig) -> "Mesh":
        """Collective: every rank creates the groups of all rows, in one order."""
        if world.size != config.world_size:
            raise ValueError(
                f"a mesh of {config.data} x {config.sequence} needs {config.world_size} ranks, "
                f"the world has {world.size}"
            )
        data_rank, sequence_rank = divmod(world.rank, config.sequence)
        groups = _Groups.build(world, config)
        return cls(
            world=world,
            data_rank=data_rank,
            data_size=config.data,
            sequence_rank=sequence_rank,
            sequence_size=config.sequence,
            timeout_seconds=config.timeout_seconds,
            **vars(groups),
        )

    def turned(self) -> "Mesh":
        """The same ranks and groups, with the sequence laid over the row from its other end.

        Each group keeps its way of travel along the row: what goes forward here goes over the group that
        carried what went backward.
        """
        return replace(
            self,
            sequence_rank=self.sequence_size - 1 - self.sequence_rank,
            forward=self.backward,
            backward=self.forward,
            descending=not self.descending,
        )

    def global_rank(self, sequence_rank: int) -> int:
        """The rank in the world of a sequence rank of this row."""
        if not 0 <= sequence_rank < self.sequence_size:
            raise ValueError(f"sequence rank {sequence_rank}: wanted 0 <= rank < {self.sequence_size}")
        place = self.sequence_size - 1 - sequence_rank if self.descending else sequence_rank
        return self.data_rank * self.sequence_size + place

    @property
    def previous_rank(self) -> int | None:
        """World rank that holds the tokens before; None on the first."""
        return self.global_rank(self.sequence_rank - 1) if self.sequence_rank > 0 else None

    @property
    def next_rank(self) -> int | None:
        """World rank that holds the tokens after; None on the last."""
        last = self.sequence_size - 1
        return self.global_rank(self.sequence_rank + 1) if self.sequence_rank < last else None


@dataclass(frozen=True)
class _Groups:
    """Own groups, so that no message waits behind a collective or behind the other direction."""

    forward: dist.ProcessGroup | None = None
    backward: dist.ProcessGroup | None = None
    row: dist.ProcessGroup | None = None
    node: dist.ProcessGroup | None = None

    @classmethod
    def build(cls, world: World, config: ParallelConfig) -> "_Groups":
        if config.sequence == 1:
            return cls()
        forward, backward, row = (_own_group(world, config, config.sequence) for _ in range(3))
        node = _own_group(world, config, config.head_parallel) if config.head_parallel > 1 else None
        for group in (row, node):
            if group is not None:
                dist.all_reduce(torch.zeros(1, device=world.device), group=group)
        for distance in sorted({1, config.head_parallel}):
            _connect(world, forward, distance)
            _connect(world, backward, -distance)
        if config.two_way_chain:
            _connect_halves(world, row, config.head_parallel)
        return cls(forward, backward, row, node)


def _own_group(world: World, config: ParallelConfig, size: int) -> dist.ProcessGroup:
    """Groups of `size` neighbouring ranks, all of them made by all ranks; returns the one of this rank."""
    mine: list[dist.ProcessGroup] = []
    for first in range(0, world.size, size):
        ranks = list(range(first, first + size))
        group = dist.new_group(
            ranks, timeout=timedelta(seconds=config.timeout_seconds), backend=world.backend
        )
        if world.rank in ranks:
            assert isinstance(group, dist.ProcessGroup), "a member of a group gets the group"
            mine.append(group)
    return mine[0]


def _connect(world: World, group: dist.ProcessGroup, distance: int) -> None:
    """Each rank of the group has sent to the one `distance` ranks after it, before any message.

    NCCL and RCCL make a communicator for every pair at its first message, and both wait for each other then:
    so half of the ranks send first.
    """
    place, size = dist.get_rank(group), dist.get_world_size(group)
    number = torch.zeros(1, device=world.device)
    sends_first = place // abs(distance) % 2 == 0
    for sends in (sends_first, not sends_first):
        other = place + distance if sends else place - distance
        if 0 <= other < size:
            peer = dist.get_global_rank(group, other)
            (dist.send if sends else dist.recv)(number, peer, group=group)


def _connect_halves(world: World, row: dist.ProcessGroup, head_parallel: int) -> None:
    """The same over the middle of the row, both ways in one operation, as pairs of micro-batches go there."""
    place, middle = dist.get_rank(row), dist.get_world_size(row) // 2
    for distance in sorted({1, head_parallel}):
        in_reach = middle - distance <= place < middle + distance
        other = place + distance if place < middle else place - distance
        if in_reach:
            peer = dist.get_global_rank(row, other)
            buffers = torch.zeros(2, device=world.device)
            operations = [
                dist.P2POp(dist.isend, buffers[:1], peer, group=row),
                dist.P2POp(dist.irecv, buffers[1:], peer, group=row),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
