"""Whether another measurement still fits into the time that a bench may take."""

import time
from collections.abc import Callable, Hashable

Now = Callable[[], float]


class Pace:
    """Measurements that are repeated at growing lengths, until `deadline` by `now`.

    Attention at twice the length costs four times; so is what a measurement will take foretold from what it
    took at the length before, all in all. The first of its kind may begin as long as there is time.
    """

    def __init__(self, deadline: float, now: Now = time.perf_counter) -> None:
        self._deadline, self.now = deadline, now
        self._took: dict[Hashable, tuple[int, float]] = {}

    def late(self, kind: Hashable, tokens: int) -> float:
        """By how many seconds the measurement would end after the deadline; 0 where it fits."""
        before, took = self._took.get(kind, (tokens, 0.0))
        end = self.now() + took * (tokens / before) ** 2
        return 0.0 if end < self._deadline else max(end - self._deadline, 1e-3)

    def took(self, kind: Hashable, tokens: int, seconds: float) -> None:
        self._took[kind] = (tokens, seconds)
