"""Steps of programs are millions of small objects without cycles: references alone free them."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the cyclic collector, which would walk them over and over for more than half of a replay's
    time and find nothing to free."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
