"""Whether a device waits for the host: small models are limited by how fast work is started, not done."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class HostClock:
    """From `begin` to `fraction` the host starts work on the device; inside `waiting` it waits for results.

    Where it hardly ever waits, the device does: a larger micro-batch would cost little more time.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._asynchronous = device.type != "cpu"
        self._clock = clock
        self._begun = self._waited = 0.0

    def begin(self) -> None:
        self._begun, self._waited = self._clock(), 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begun = self._clock()
        yield
        self._waited += self._clock() - begun

    def fraction(self) -> float | None:
        """Share of the time since `begin` that the host did not wait; None where the host is the device."""
        elapsed = self._clock() - self._begun
        return 1 - self._waited / elapsed if self._asynchronous and elapsed > 0 else None
