"""How the C library's allocator treats the large blocks that tensors on the CPU come from."""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**30


def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks for the next tensors, up to a GiB; returns whether it does.

    By default every large block comes from the system and goes back to it, so each new tensor costs a page
    fault per 4 KiB: a tenth of a training step and more. Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, _KEPT_BYTES) == 1 for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))
