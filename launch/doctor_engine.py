"""Whether the training engine takes the step of plain torch, with the stage and precision of a run."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvm_dist.config import RunConfig
from launch.finding import Finding
from parallel.placement import world_from_environment

if TYPE_CHECKING:
    from parallel.world import World

FIX = "install the versions of constraints.txt, or use another parallel.zero_stage or parallel.precision"
_ALONE = {"data": 1, "sequence": 1, "head_parallel": 1}


def check_engine(config: RunConfig) -> Iterator[Finding]:
    """In a process of its own; ranks of several check it together, once they have met."""
    if world_from_environment(os.environ).size > 1:
        return
    try:
        from parallel.world import join_world, leave_world

        world = join_world(config.parallel.model_copy(update=_ALONE), config.device)
        try:
            found, fix = engine_verdict(config, world)
        finally:
            leave_world()
    except (AssertionError, ConnectionError, ImportError, RuntimeError, ValueError) as error:
        found, fix = f"{type(error).__name__}: {error}", FIX
    yield Finding("engine", "fail" if fix else "ok", found, fix)


def engine_verdict(config: RunConfig, world: "World") -> tuple[str, str]:
    """(found, fix); fix is empty where engine and plain torch agree. Collective."""
    from parallel.engine.self_check import check_engine as compare

    parallel, check = config.parallel, compare(config.parallel, world)
    found = (
        f"a step of {world.size} ranks, ZeRO-{parallel.zero_stage}, {parallel.precision} is off from plain "
        f"torch by {check.norm_error:.1e} in the gradient's norm and {check.update_error:.1e} in the update"
    )
    return found, "" if check.holds else FIX
