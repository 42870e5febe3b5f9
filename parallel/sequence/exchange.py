"""Messages between neighbours along the sequence: in order, named, never blocking the sender."""

import math
import time
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh import Mesh
from parallel.sequence.packing import pack, packed_bytes, unpacked
from parallel.sequence.problems import naming_problems, wait_for

_LABEL_BYTES = 256
_CHECKED_MESSAGES = 2000  # between two ranks, of one direction


@dataclass(frozen=True)
class _Sent:
    """A message on its way: the buffers must live until `work` is done."""

    name: str
    to: int
    works: tuple[dist.Work, ...]
    buffers: tuple[Tensor, ...]


class RankExchange:
    """The `Exchange` over process groups, one per direction.

    Messages are matched by order. The first `checked_messages` between two ranks go with a label, so that
    ranks whose order has diverged get a ValueError that names both messages instead of each other's bytes.
    By default all on gloo; elsewhere, where reading a label stops the device, those of the first steps, whose
    order the others repeat. What nobody takes is found by `drain`.

    Raises TimeoutError or ConnectionError naming peer, message and, of a receive, direction; a send only the
    latter, where the connection is known to be lost.
    """

    def __init__(self, mesh: Mesh, *, checked_messages: float | None = None) -> None:
        if mesh.forward is None or mesh.backward is None:
            raise ValueError("parallel.sequence=1 has no neighbours to exchange with; use NoExchange")
        self._mesh = mesh
        self._forward, self._backward = mesh.forward, mesh.backward
        if checked_messages is None:
            checked_messages = math.inf if mesh.world.backend == "gloo" else _CHECKED_MESSAGES
        self.checked_messages = checked_messages
        self._counted: Counter[tuple[str, int, bool]] = Counter()
        self._sent: list[_Sent] = []
        self._sent_before: list[_Sent] = []  # the last `release`
        self.has_previous = mesh.previous_rank is not None
        self.has_next = mesh.next_rank is not None
        self.bytes_sent = 0
        self.waited_seconds = 0.0  # for messages of others, on the host

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._send(name, tensors, self._mesh.next_rank, self._forward)

    def send_previous(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._send(name, tensors, self._mesh.previous_rank, self._backward)

    def receive_previous(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._receive(name, like, self._mesh.previous_rank, self._forward, "forward")

    def receive_next(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._receive(name, like, self._mesh.next_rank, self._backward, "backward")

    def send_to(self, rank: int, name: str, tensors: tuple[Tensor, ...]) -> None:
        """To any sequence rank of the row, over the group of its direction: where two ranks send to each
        other at once, NCCL would have each wait in line behind its own message if they shared one."""
        group = self._forward if rank > self._mesh.sequence_rank else self._backward
        self._send(name, tensors, self._mesh.global_rank(rank), group)

    def receive_from(self, rank: int, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        forward = rank < self._mesh.sequence_rank
        group, direction = (self._forward, "forward") if forward else (self._backward, "backward")
        return self._receive(name, like, self._mesh.global_rank(rank), group, direction)

    def swap_with(self, rank: int, name: str, tensors: tuple[Tensor, ...]) -> "_Swapped":
        """Start to send to a sequence rank of the row and to receive tensors of the same shapes from it, as
        one operation. `take` raises what a receive does."""
        group, device = self._mesh.row, self._mesh.world.device
        assert group is not None, "a row of several ranks has a group"
        other = self._mesh.global_rank(rank)
        payload = torch.empty(packed_bytes(tensors), dtype=torch.uint8, device=device)
        pack(tensors, payload)
        buffers = [payload] if payload.numel() else []
        if labelled := self._is_checked("swap", other, group):
            buffers.insert(0, _label(name, payload.numel(), device))
        came = [torch.empty_like(buffer) for buffer in buffers]
        arriving = came[-1] if payload.numel() else torch.empty_like(payload)
        operations = [
            dist.P2POp(operation, buffer, other, group=group)
            for pair in zip(buffers, came, strict=True)
            for operation, buffer in zip((dist.isend, dist.irecv), pair, strict=True)
        ]
        with naming_problems(self._mesh, _not_taken(name, other)):
            works = dist.batch_isend_irecv(operations) if operations else []
        self.bytes_sent += payload.numel()
        return _Swapped(self, other, works, buffers, came[0] if labelled else None, arriving)

    @property
    def bytes_kept(self) -> int:
        """In buffers of messages that may be on their way."""
        return sum(buffer.nbytes for one in (*self._sent_before, *self._sent) for buffer in one.buffers)

    def release(self) -> None:
        """Wait until every message sent before the last call has left; frees their buffers.

        Call it after each micro-batch: those of the one before were taken by then, unless another rank is
        that far behind.
        """
        sent, self._sent_before, self._sent = self._sent_before, self._sent, []
        self._wait_for(sent)

    def drain(self) -> None:
        """Wait until every message has left; frees the buffers. Call it at the end of a step."""
        sent, self._sent_before, self._sent = [*self._sent_before, *self._sent], [], []
        self._wait_for(sent)

    def _wait_for(self, sent: list[_Sent]) -> None:
        for message in sent:
            for work in message.works:
                self._wait(work, _not_taken(message.name, message.to))

    def _send(self, name: str, tensors: tuple[Tensor, ...], to: int | None, group: dist.ProcessGroup) -> None:
        assert to is not None, f"{name}: no neighbour on that side"
        payload = torch.empty(packed_bytes(tensors), dtype=torch.uint8, device=self._mesh.world.device)
        pack(tensors, payload)
        buffers = (payload,) if payload.numel() else ()
        if self._is_checked("send", to, group):
            buffers = (_label(name, payload.numel(), self._mesh.world.device), *buffers)
        works: list[dist.Work] = []
        for buffer in buffers:
            with naming_problems(self._mesh, _not_taken(name, to)):
                work = dist.isend(buffer, to, group=group)
            assert work is not None, "a member of the group gets a handle"
            works.append(work)
        self._sent.append(_Sent(name, to, tuple(works), buffers))
        self.bytes_sent += payload.numel()

    def _receive(
        self,
        name: str,
        like: tuple[Tensor, ...],
        source: int | None,
        group: dist.ProcessGroup,
        direction: str,
    ) -> tuple[Tensor, ...]:
        assert source is not None, f"{name}: no neighbour on that side"
        expected = packed_bytes(like)
        if self._is_checked("receive", source, group):
            label = torch.empty(_LABEL_BYTES, dtype=torch.uint8, device=self._mesh.world.device)
            self._take(label, name, source, group, direction)
            _check_label(label, name, expected, source, direction)
        payload = torch.empty(expected, dtype=torch.uint8, device=self._mesh.world.device)
        if expected:
            self._take(payload, name, source, group, direction)
        return _owned(unpacked(payload, like))

    def wait_for_swap(self, works: list[dist.Work], name: str, source: int) -> None:
        for work in works:
            self._wait(work, f"nothing came from rank {source} for {name!r} (both ways)")

    def _is_checked(self, operation: str, peer: int, group: dist.ProcessGroup) -> bool:
        """Both ends count alike: message i of one is message i of the other."""
        way = (operation, peer, group is self._forward)
        self._counted[way] += 1
        return self._counted[way] <= self.checked_messages

    def _take(self, buffer: Tensor, name: str, source: int, group: dist.ProcessGroup, direction: str) -> None:
        problem = f"nothing came from rank {source} for {name!r} ({direction})"
        with naming_problems(self._mesh, problem):
            work = dist.irecv(buffer, source, group=group)
        assert work is not None, "a member of the group gets a handle"
        self._wait(work, problem)

    def _wait(self, work: dist.Work, problem: str) -> None:
        begun = time.monotonic()
        wait_for(work, self._mesh, problem)
        self.waited_seconds += time.monotonic() - begun


@dataclass
class _Swapped:
    """Messages to and from one rank on their way. label, payload: what comes."""

    over: RankExchange
    source: int
    works: list[dist.Work]
    sent: list[Tensor]
    label: Tensor | None
    payload: Tensor

    def take(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.over.wait_for_swap(self.works, name, self.source)
        if self.label is not None:
            _check_label(self.label, name, packed_bytes(like), self.source, "both ways")
        if packed_bytes(like) != self.payload.numel():
            raise ValueError(
                f"{name!r} of {packed_bytes(like)} bytes was to come from rank {self.source} for a message "
                f"of {self.payload.numel()} bytes; ranks at the middle need shards and heads of one shape"
            )
        return _owned(unpacked(self.payload, like))


def _owned(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """With storage of their own each, as autograd expects."""
    return tensors if len(tensors) == 1 else tuple(one.clone() for one in tensors)


def _not_taken(name: str, by: int) -> str:
    return f"rank {by} has not taken {name!r}"


def _label(name: str, payload_bytes: int, device: torch.device) -> Tensor:
    """`bytes name`, cut and padded to a fixed length."""
    text = f"{payload_bytes} {name}".encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES, b"\0")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def _check_label(label: Tensor, name: str, expected: int, source: int, direction: str) -> None:
    if torch.equal(label, _label(name, expected, label.device)):
        return
    size, _, came = bytes(label.tolist()).rstrip(b"\0").decode(errors="replace").partition(" ")
    raise ValueError(
        f"the ranks' order of messages has diverged ({direction}): wanted {name!r} of {expected} bytes from "
        f"rank {source}, got {came!r} of {size} bytes; every rank must run the same layers in the same order "
        "on shards of the same batch"
    )
