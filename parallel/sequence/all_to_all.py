"""Every rank of a group gives each of them a part, itself included, while it goes on computing."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh import Mesh
from parallel.sequence.packing import pack, packed_bytes, unpacked
from parallel.sequence.problems import naming_problems, wait_for

Part = tuple[Tensor, ...]


class Flight(Protocol):
    """A swap on its way."""

    def land(self) -> list[Part]:
        """Wait for it: one part from each rank, in the order of the sequence. Once."""
        ...


class AllToAll(Protocol):
    """Raw transport among some sequence ranks, which start the same swaps in the same order."""

    def start(self, name: str, parts: Sequence[Part], like: Sequence[Part]) -> Flight:
        """parts: one for each rank, in the order of the sequence; they may change once this returns. like:
        what comes from each, of which shapes and dtypes are read."""
        ...


class GroupAllToAll:
    """`AllToAll` over a process group of neighbouring sequence ranks, as one collective a swap.

    Messages between pairs would not do: NCCL and RCCL would have each of two ranks wait for the other to
    take its own. Raises TimeoutError or ConnectionError naming the swap.
    """

    def __init__(self, mesh: Mesh, group: dist.ProcessGroup | None) -> None:
        if group is None:
            raise ValueError("no ranks to swap with: parallel.sequence and parallel.head_parallel name them")
        self._mesh, self._group = mesh, group
        self._own = dist.get_rank(group)
        self.bytes_sent = 0
        self.waited_seconds = 0.0  # for the parts of others, on the host

    def start(self, name: str, parts: Sequence[Part], like: Sequence[Part]) -> "_InFlight":
        parts, like = self._along_the_group(parts), self._along_the_group(like)
        sizes, expected = [packed_bytes(part) for part in parts], [packed_bytes(part) for part in like]
        device = self._mesh.world.device
        sent = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        for part, buffer in zip(parts, sent.split(sizes), strict=True):
            pack(part, buffer)
        received = torch.empty(sum(expected), dtype=torch.uint8, device=device)
        with naming_problems(self._mesh, *_in_words(name)):
            work = dist.all_to_all_single(received, sent, expected, sizes, group=self._group, async_op=True)
        assert work is not None, "a member of the group gets a handle"
        others = [part for rank, part in enumerate(parts) if rank != self._own]
        self.bytes_sent += sum(tensor.nbytes for part in others for tensor in part)
        buffers = received.split(expected)
        arriving = [unpacked(buffer, part) for buffer, part in zip(buffers, like, strict=True)]
        return _InFlight(self, name, work, sent, list(self._along_the_group(arriving)))

    def wait(self, name: str, work: dist.Work) -> None:
        begun = time.monotonic()
        wait_for(work, self._mesh, *_in_words(name))
        self.waited_seconds += time.monotonic() - begun

    def _along_the_group(self, parts: Sequence[Part]) -> Sequence[Part]:
        """From the order of the sequence to that of the process group, or back."""
        return parts[::-1] if self._mesh.descending else parts


def _in_words(name: str) -> tuple[str, str]:
    return f"not all ranks came to {name!r}", f"{name!r} failed"


@dataclass(frozen=True)
class _InFlight:
    """sent, arriving: buffers, which must live until `work` is done."""

    over: GroupAllToAll
    name: str
    work: dist.Work
    sent: Tensor
    arriving: list[Part]

    def land(self) -> list[Part]:
        self.over.wait(self.name, self.work)
        return self.arriving
