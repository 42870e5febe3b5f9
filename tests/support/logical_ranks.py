"""Sequence ranks as threads of one process: the same messages as between processes, and no process group.

results = run_logical_ranks(4, lambda rank, exchange: ...)
"""

import threading
from collections.abc import Callable
from queue import Empty, Queue
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Message = tuple[str, tuple[Tensor, ...]]
Pipe = Queue[Message | None]  # None: the rank that sends has failed


class QueueExchange:
    """An `Exchange` over in-memory queues: sends copy and return at once, receives check what arrives."""

    def __init__(
        self,
        from_previous: Pipe | None,
        to_next: Pipe | None,
        from_next: Pipe | None,
        to_previous: Pipe | None,
        timeout_seconds: float = 60.0,
    ) -> None:
        self.has_previous = from_previous is not None
        self.has_next = to_next is not None
        self.sent: list[tuple[str, str, int]] = []  # (direction, name, bytes) of every message
        self._from_previous, self._to_next = from_previous, to_next
        self._from_next, self._to_previous = from_next, to_previous
        self._timeout_seconds = timeout_seconds

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._send("next", name, tensors, self._to_next)

    def send_previous(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._send("previous", name, tensors, self._to_previous)

    def receive_previous(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._receive(name, like, self._from_previous)

    def receive_next(self, name: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._receive(name, like, self._from_next)

    def fail(self) -> None:
        """Let the neighbours know that nothing more will come."""
        for queue in (self._to_next, self._to_previous):
            if queue is not None:
                queue.put(None)

    def check_all_taken(self, rank: int) -> None:
        for queue in (self._from_previous, self._from_next):
            names = [] if queue is None else [message[0] for message in queue.queue if message]
            assert not names, f"rank {rank} has not taken {names[0]!r}"

    def _send(self, direction: str, name: str, tensors: tuple[Tensor, ...], queue: Pipe | None) -> None:
        assert queue is not None, f"{name}: there is no {direction} rank"
        self.sent.append((direction, name, sum(tensor.nbytes for tensor in tensors)))
        queue.put((name, tuple(tensor.detach().clone() for tensor in tensors)))

    def _receive(self, name: str, like: tuple[Tensor, ...], queue: Pipe | None) -> tuple[Tensor, ...]:
        assert queue is not None, f"{name}: there is no rank on that side"
        try:
            message = queue.get(timeout=self._timeout_seconds)
        except Empty:
            raise TimeoutError(f"{name}: nothing came in {self._timeout_seconds} s") from None
        if message is None:
            raise ConnectionError(f"{name}: the rank that should send it has failed")
        arrived_name, arrived = message
        assert arrived_name == name, f"wanted {name}, got {arrived_name}"
        got = [(tuple(tensor.shape), tensor.dtype) for tensor in arrived]
        wanted = [(tuple(tensor.shape), tensor.dtype) for tensor in like]
        assert got == wanted, f"{name}: wanted {wanted}, got {got}"
        return arrived


def queue_exchanges(ranks: int, timeout_seconds: float = 60.0) -> list[QueueExchange]:
    """One exchange per rank, joined to its neighbours."""
    forward: list[Pipe] = [Queue() for _ in range(ranks - 1)]
    backward: list[Pipe] = [Queue() for _ in range(ranks - 1)]
    return [
        QueueExchange(
            from_previous=forward[rank - 1] if rank > 0 else None,
            to_next=forward[rank] if rank < ranks - 1 else None,
            from_next=backward[rank] if rank < ranks - 1 else None,
            to_previous=backward[rank - 1] if rank > 0 else None,
            timeout_seconds=timeout_seconds,
        )
        for rank in range(ranks)
    ]


def run_logical_ranks(
    ranks: int, work: Callable[[int, QueueExchange], Result], timeout_seconds: float = 60.0
) -> list[Result]:
    """`work(rank, exchange)` of every rank at once, in threads; the first error of a rank is raised here.
    Raises AssertionError if a message is left over.

    PyTorch runs the backwards of one process's CPU graphs in the thread that calls them, so backwards of
    different ranks may wait for each other.
    """
    exchanges = queue_exchanges(ranks, timeout_seconds)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            torch.set_num_threads(1)
            results[rank] = work(rank, exchanges[rank])
        except BaseException as error:
            errors.append(error)
            exchanges[rank].fail()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for rank, exchange in enumerate(exchanges):
        exchange.check_all_taken(rank)
    return [results[rank] for rank in range(ranks)]
