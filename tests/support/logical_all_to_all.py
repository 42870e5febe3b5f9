"""`AllToAll` between the logical ranks of one process."""

import threading
from collections.abc import Sequence

from torch import Tensor


class LogicalRow:
    """The parts that ranks leave for each other, one swap at a time."""

    def __init__(self, ranks: int, timeout_seconds: float = 60.0) -> None:
        self._barrier = threading.Barrier(ranks, timeout=timeout_seconds)
        self._left: list[tuple[str, list[Tensor]]] = [("", [])] * ranks

    def rank(self, rank: int) -> "LogicalAllToAll":
        return LogicalAllToAll(self, rank)

    def swap(self, rank: int, name: str, parts: list[Tensor]) -> list[Tensor]:
        self._left[rank] = (name, parts)
        self._barrier.wait()
        names = {left_name for left_name, _ in self._left}
        assert names == {name}, f"ranks came to different swaps: {sorted(names)}"
        taken = [left_parts[rank] for _, left_parts in self._left]
        self._barrier.wait()
        return taken


class LogicalAllToAll:
    def __init__(self, row: LogicalRow, rank: int) -> None:
        self.sent: list[tuple[str, int]] = []  # name and bytes to other ranks of every swap
        self._row, self._rank = row, rank

    def swap(self, name: str, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        others = [part for rank, part in enumerate(parts) if rank != self._rank]
        self.sent.append((name, sum(part.nbytes for part in others)))
        received = self._row.swap(self._rank, name, [part.detach().clone() for part in parts])
        got = [(tuple(one.shape), one.dtype) for one in received]
        wanted = [(tuple(one.shape), one.dtype) for one in like]
        assert got == wanted, f"{name}: wanted {wanted}, got {got}"
        return received
