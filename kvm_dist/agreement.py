"""Rank 0 decides, all ranks learn the outcome: the value, or the same error on each."""

from collections.abc import Callable
from typing import TypeVar

from kvm_dist.exit_codes import RunError
from parallel import collectives
from parallel.world import World

T = TypeVar("T")


def on_rank_zero(world: World, function: Callable[[], T]) -> T:
    """Call `function` on rank 0 and return its value on every rank; collective.

    A RunError of rank 0 is raised on every rank, so that all end with one exit code.
    """
    value: T | None = None
    error: RunError | None = None
    if world.rank == 0:
        try:
            value = function()
        except RunError as problem:
            error = problem
    value, error = collectives.broadcast_object((value, error))
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
