"""Errors of the library that say who misses what."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from parallel.mesh import Mesh


@contextmanager
def naming_problems(mesh: Mesh, silence: str, failure: str | None = None) -> Iterator[None]:
    """Turns what torch.distributed raises, at once or after a while, into an error that people can act on.

    Raises TimeoutError with `silence`, or ConnectionError with `failure` (the same, if None) and the reason.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        here = f"sequence rank {mesh.sequence_rank} (rank {mesh.world.rank})"
        if "timed out" in reason.lower() or "timeout" in reason.lower():
            raise TimeoutError(
                f"{here}: {silence} in {mesh.timeout_seconds:g} s (parallel.timeout_seconds)"
            ) from error
        raise ConnectionError(f"{here}: {failure or silence}: {reason}") from error


def wait_for(work: dist.Work, mesh: Mesh, silence: str, failure: str | None = None) -> None:
    """Until it is done, at most the time-out of the mesh; problems as above.

    With NCCL the device waits, and the host goes on: given a time-out it would stand still too, and start no
    kernel meanwhile. Its own watchdog and that of the run find who is silent.
    """
    with naming_problems(mesh, silence, failure):
        if mesh.world.backend == "nccl":
            work.wait()
        else:
            work.wait(timedelta(seconds=mesh.timeout_seconds))
