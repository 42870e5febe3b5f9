"""Signals only set a flag; the ranks agree on it at the next step boundary."""

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class StopRequest:
    """Whether this process was asked to save and stop. A repeated signal changes nothing."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def install(self) -> "StopRequest":
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = self.signal_name or signal.Signals(number).name

    def __call__(self) -> bool:
        return self.signal_name is not None
