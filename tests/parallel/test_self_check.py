"""The engine is compared with plain torch, and what it loses is seen."""

from typing import Any

import pytest
import torch

from parallel.config import ParallelConfig
from parallel.engine.deepspeed import Engine
from parallel.engine.self_check import EngineCheck, check_engine
from parallel.world import World
from tests.support.ranks import Ranks

LAYOUTS = [(0, "float32"), *[(stage, one) for stage in (1, 2, 3) for one in ("float32", "bfloat16")]]


def checked(world: World, stage: int, precision: str) -> EngineCheck:
    return check_engine(ParallelConfig(zero_stage=stage, precision=precision), world)


@pytest.mark.parametrize(("stage", "precision"), LAYOUTS)
def test_the_engine_takes_the_step_of_plain_torch(two_ranks: Ranks, stage: int, precision: str) -> None:
    first, second = two_ranks.run(checked, stage, precision)
    assert first == second
    assert first.holds, first
    assert first.update_error < first.tolerance / 5, "there is room for other devices"


def losing(world: World, what: str) -> EngineCheck:
    """An engine that forgets a micro-batch's gradient, or of which a rank's norm or step is no number."""
    backward, step = Engine.backward, Engine.step

    def lossy_backward(self: Engine, loss: torch.Tensor) -> None:
        backward(self, loss * 0 if self._micro_batches == 0 and world.rank == 1 else loss)

    def lossy_step(self: Engine, *rates: Any) -> Any:
        result = step(self, *rates)
        return type(result)(result.applied, float("nan") if world.rank == 1 else result.gradient_norm)

    try:
        if what == "gradient":
            Engine.backward = lossy_backward  # type: ignore[method-assign]
        else:
            Engine.step = lossy_step  # type: ignore[method-assign]
        return checked(world, 1, "float32")
    finally:
        Engine.backward, Engine.step = backward, step  # type: ignore[method-assign]


@pytest.mark.parametrize("what", ["gradient", "norm"])
def test_what_one_rank_loses_is_seen_on_all(two_ranks: Ranks, what: str) -> None:
    first, second = two_ranks.run(losing, what)
    assert first == second
    assert not first.holds
