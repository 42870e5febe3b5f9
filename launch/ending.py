"""From how a command ended to its message and its exit code."""

import errno
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from kvm_dist.exit_codes import ExitCode, RunError

_OF_THE_DISK = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG}


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
        if error.errno not in _OF_THE_DISK or error.filename is None:
            traceback.print_exc()
            return int(ExitCode.CRASH)
        print(f"kvm-dist: {error.filename}: {error.strerror}; make room or permissions", file=sys.stderr)
        return int(ExitCode.STORAGE)
    except Exception:
        traceback.print_exc()
        return int(ExitCode.CRASH)
    return int(ExitCode.DONE)


def leave(code: int) -> NoReturn:
    """End the process; after a failure at once: threads of a broken process group would abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    sys.exit(0)
