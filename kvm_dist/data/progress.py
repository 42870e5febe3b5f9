"""Progress of a long command: a bar with the time left on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

LINE_EVERY_SECONDS = 5.0


class Progress(Protocol):
    """Told how many bytes are done."""

    def advance(self, amount: int) -> None: ...


class _Silent:
    def advance(self, amount: int) -> None:
        pass


class _Lines:
    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, max(1, total), 0
        self._started = self._printed = time.monotonic()

    def advance(self, amount: int) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._printed < LINE_EVERY_SECONDS and self._done < self._total:
            return
        self._printed = now
        elapsed = now - self._started
        left = elapsed / max(1, self._done) * (self._total - self._done)
        print(
            f"{self._label}: {self._done / 1e6:.1f} of {self._total / 1e6:.1f} MB, "
            f"{elapsed:.0f} s, {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def show_progress(label: str, total: int, silent: bool = False) -> Iterator[Progress]:
    """Report on standard error how much of `total` bytes is done."""
    if silent or not sys.stderr.isatty():
        yield _Silent() if silent else _Lines(label, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield _RichBar(bar, task)


class _RichBar:
    def __init__(self, bar: object, task: int) -> None:
        self._bar, self._task = bar, task

    def advance(self, amount: int) -> None:
        self._bar.advance(self._task, amount)  # type: ignore[attr-defined]
