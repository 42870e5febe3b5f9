"""From how a command ended to its message and its exit code."""

import errno
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, TextIO

from kvm_dist.exit_codes import ExitCode, RunError
from launch.streams import CUT_SHORT

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}


def exit_code_of(action: Callable[[], object]) -> int:
    """Run `action`; say on stderr what went wrong, if anything did, and return the exit code."""
    try:
        action()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except RunError as error:
        print(f"kvm-dist: {error}", file=sys.stderr)
        return int(error.code)
    except KeyboardInterrupt:
        print("kvm-dist: interrupted", file=sys.stderr)
        return int(ExitCode.CRASH)
    except OSError as error:
        if error.errno not in (_FULL if error.filename is None else _FULL | _FORBIDDEN):
            traceback.print_exc()
            return int(ExitCode.CRASH)
        place = "a file, or what is printed into one" if error.filename is None else error.filename
        print(f"kvm-dist: {place}: {error.strerror}; make room or permissions", file=sys.stderr)
        return int(ExitCode.STORAGE)
    except Exception:
        traceback.print_exc()
        return int(ExitCode.CRASH)
    return int(ExitCode.DONE)


def leave(code: int) -> NoReturn:
    """End the process; after a failure at once: threads of a broken process group would abort it."""
    flushed = [_flush(sys.stdout), _flush(sys.stderr)]
    code = code or max(flushed)
    if code:
        os._exit(code)
    sys.exit(0)


def _flush(stream: TextIO) -> int:
    """The exit code of what came of the last lines: a full disk has no room for them.

    All was done, and nobody wanted to read the last lines: no failure.
    """
    code = exit_code_of(stream.flush)
    return int(ExitCode.DONE) if code == CUT_SHORT else code
