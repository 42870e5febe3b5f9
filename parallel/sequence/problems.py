"""Errors of the library that say who misses what."""

from collections.abc import Iterator
from contextlib import contextmanager

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
