"""From how a command ended to its message and its exit code."""

import sys
import traceback
from collections.abc import Callable

from kvm_dist.exit_codes import ExitCode, RunError


def exit_code_of(action: Callable[[], object]) -> int:
    """Run `action`; say on stderr what went wrong, if anything did, and return the documented exit code."""
    try:
        action()
    except RunError as error:
        print(f"kvm-dist: {error}", file=sys.stderr, flush=True)
        return int(error.code)
    except KeyboardInterrupt:
        print("kvm-dist: interrupted", file=sys.stderr, flush=True)
        return int(ExitCode.CRASH)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        return int(ExitCode.CRASH)
    return int(ExitCode.DONE)
