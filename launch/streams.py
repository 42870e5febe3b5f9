"""The standard streams of a command, whose reader, such as `head`, may have enough before all is said."""

import io
import os
import signal
import sys

CUT_SHORT = 128 + signal.SIGPIPE  # what shells tell of programs that ended because nobody read on


def guard_streams() -> None:
    """Replace this process's stdout and stderr by `Output` and `Complaints`."""
    for name, kind in (("stdout", Output), ("stderr", Complaints)):
        stream = getattr(sys, name)
        if stream is None:  # closed, as some daemons start their programs
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, kind.instead_of(stream))


class _Guarded(io.TextIOWrapper):
    """Says nothing more when nobody reads on."""

    @classmethod
    def instead_of(cls, stream: io.TextIOWrapper) -> "_Guarded":
        """An encoding without some letter gets a sign in its place."""
        stream.flush()
        return cls(
            stream.buffer,
            stream.encoding,
            errors="replace" if stream.errors in ("strict", "surrogateescape") else stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            self._nobody_reads()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            self._nobody_reads()

    def _nobody_reads(self) -> None:
        """What is still buffered, and all that follows, goes nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


class Complaints(_Guarded):
    """What goes on beside the command's result: the command goes on without a reader of it."""


class Output(_Guarded):
    """A command's result: without a reader the command ends, as SIGPIPE ends other programs."""

    def _nobody_reads(self) -> None:
        super()._nobody_reads()
        raise SystemExit(CUT_SHORT)
