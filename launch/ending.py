"""From how a command ended to its message and its exit code."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from kvm_dist.exit_codes import ExitCode, RunError


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
