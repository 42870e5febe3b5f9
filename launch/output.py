"""Where a rank's output goes: rank 0's to the terminal and to its log. Imports no torch."""

import os
import pty
import re
import shutil
import sys
import termios
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TextIO

_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")


class CopiedOutput:
    """The two streams of a process, copied to ours and to a log until the process has closed them.

    Where ours is a terminal the process sees one too, and may redraw its last line; the log gets that line
    once, when it is finished.
    """

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._threads: list[threading.Thread] = []
        self._theirs: list[int] = []
        self.stdout, self.stderr = self._stream(sys.stdout), self._stream(sys.stderr)

    def started(self) -> None:
        """The process holds its ends now: drop ours, or the copying would never end."""
        for descriptor in self._theirs:
            os.close(descriptor)

    def join(self, timeout_seconds: float) -> None:
        """Wait until all is copied; a process that the rank left behind may hold the stream longer."""
        for thread in self._threads:
            thread.join(timeout_seconds)

    def _stream(self, ours: TextIO) -> int:
        """A descriptor for the process, read by a thread."""
        if ours.isatty():
            source, theirs = pty.openpty()
            attributes = termios.tcgetattr(theirs)
            attributes[1] &= ~termios.OPOST  # our terminal translates line ends itself
            termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        else:
            source, theirs = os.pipe()
        thread = threading.Thread(target=self._copy, args=(source, ours.fileno()), daemon=True)
        thread.start()
        self._threads.append(thread)
        self._theirs.append(theirs)
        return theirs

    def _copy(self, source: int, terminal: int) -> None:
        with open(self._log_path, "ab", buffering=0) as file, open(source, "rb", buffering=0) as stream:
            log = FinishedLines(file)
            while block := _read(stream):
                log.write(block)
                with suppress(OSError):  # the terminal is gone: the log goes on
                    os.write(terminal, block)
            log.close()


class FinishedLines:
    """Writes lines as a terminal leaves them behind, without what was overwritten and without colours."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._open = b""

    def write(self, block: bytes) -> None:
        *lines, last = (self._open + block).split(b"\n")
        self._file.write(b"".join(_visible(line) + b"\n" for line in lines))
        self._open = last if last.endswith(b"\r") else last.rpartition(b"\r")[2]

    def close(self) -> None:
        if self._open:
            self._file.write(_visible(self._open) + b"\n")


def terminal_columns(environment: dict[str, str]) -> dict[str, str]:
    """COLUMNS for a process that sees a terminal only through us."""
    if "COLUMNS" in environment or not sys.stderr.isatty():
        return {}
    return {"COLUMNS": str(shutil.get_terminal_size().columns)}


def _visible(line: bytes) -> bytes:
    return _CONTROL.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2])


def _read(stream: BinaryIO) -> bytes:
    try:
        return stream.read(65536)
    except OSError:  # a pseudo terminal whose other end is closed
        return b""
