"""How far a run is: a live line on a terminal, now and then a plain line elsewhere. Imports no torch."""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

_MOST_BAR_CELLS, _FEWEST_BAR_CELLS = 30, 6
_SMOOTHING = 0.1
_REDRAW_SECONDS = 0.1


class Progress:
    """Shows step, loss, speed and the time left.

    On a terminal one line is redrawn in place. Elsewhere (log files, Slurm) a line is printed for the first
    and the last step, for every step with a validation loss, and otherwise every `line_seconds`.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        stream: TextIO | None = None,
        line_seconds: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
        noun: str = "step",
        begun: float | None = None,
    ) -> None:
        """noun: what is counted; begun: when the first of them began by `clock`, now if None."""
        self.total, self._noun = total_steps, noun
        self._step = start_step
        self._stream = sys.stderr if stream is None else stream
        self._line_seconds = line_seconds
        self._clock = clock
        self._live = self._stream.isatty()
        self._full, self._empty = (
            ("━", "┄") if (self._stream.encoding or "").startswith("utf") else ("=", ".")
        )
        self._updated = clock() if begun is None else begun
        self._shown: float | None = None
        self._seconds_per_step: float | None = None
        self._validation: float | None = None
        self._open_line = False

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell that `step` steps are done; of the metrics loss, speed and validation are shown."""
        now = self._clock()
        self._measure(step, now)
        validated = "validation/loss" in metrics
        if validated:
            self._validation = metrics["validation/loss"]
        every = _REDRAW_SECONDS if self._live else self._line_seconds
        due = self._shown is None or now - self._shown >= every
        if due or validated or step >= self.total:
            self._shown = now
            self._show(self._text(metrics), closing=step >= self.total)

    def close(self) -> None:
        """Leaves the cursor on a fresh line; call it before anything else is printed."""
        if self._open_line:
            self._write("\n")
            self._open_line = False

    def _write(self, text: str) -> None:
        """A terminal that was closed does not end the run."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()

    def _measure(self, step: int, now: float) -> None:
        if step <= self._step:
            return
        latest = (now - self._updated) / (step - self._step)
        before = self._seconds_per_step
        self._seconds_per_step = latest if before is None else before + _SMOOTHING * (latest - before)
        self._step, self._updated = step, now

    def _text(self, metrics: Mapping[str, float]) -> str:
        width = len(str(self.total))
        parts = [f"{self._noun} {self._step:{width}d}/{self.total}", f"{100 * self._step // self.total:3d}%"]
        if "train/loss" in metrics:
            parts.append(f"loss {metrics['train/loss']:.4f}")
        if self._validation is not None:
            parts.append(f"val {self._validation:.4f}")
        if "perf/tokens_per_second" in metrics:
            parts.append(f"{short_count(metrics['perf/tokens_per_second'])} tok/s")
        if self._seconds_per_step is not None and self._step < self.total:
            parts.append(f"{duration(self._seconds_per_step * (self.total - self._step))} left")
        return "  ".join(parts)

    def _bar(self, columns: int) -> str:
        """As wide as the text leaves room for, nothing if that is too little."""
        cells = min(columns - 2, _MOST_BAR_CELLS)
        if cells < _FEWEST_BAR_CELLS:
            return ""
        filled = min(cells, cells * self._step // self.total)
        return self._full * filled + self._empty * (cells - filled) + "  "

    def _show(self, text: str, closing: bool) -> None:
        if self._live:
            columns = shutil.get_terminal_size().columns - 1
            line = f"{self._bar(columns - len(text))}{text}"[:columns]
            self._write(f"\r\x1b[2K{line}")
            self._open_line = True
        else:
            self._write(text + "\n")
        if closing:
            self.close()


def duration(seconds: float) -> str:
    """12 s, 3:07 min, 1:02:03 h or 2 d 03 h."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if whole < 60:
        return f"{whole} s"
    if hours == 0:
        return f"{minutes}:{rest:02d} min"
    if hours < 48:
        return f"{hours}:{minutes:02d}:{rest:02d} h"
    return f"{hours // 24} d {hours % 24:02d} h"


def short_count(value: float) -> str:
    """950, 14.2K, 1.35M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.0f}"
