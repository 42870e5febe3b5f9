import time
from datetime import timedelta
from typing import Any

import torch

from kvm_dist.hang import hang_behind
from parallel import collectives
from parallel.config import ParallelConfig
from parallel.engine.deepspeed import Engine
from parallel.world import World
from tests.support.ranks import Ranks, run_ranks


def wait_for_a_silent_rank(world: World) -> str:
    if world.rank == 1:
        time.sleep(20)
        return ""
    try:
        collectives.sum(torch.ones(1))
    except RuntimeError as error:
        return str(hang_behind(error, world.rank, 8.0))
    return "answered"


def test_a_collective_that_is_not_answered_is_a_hang() -> None:
    with Ranks(2, group_timeout_seconds=8) as ranks:
        said, _ = ranks.run(wait_for_a_silent_rank)
    assert "another rank has not joined a collective in 8 s (parallel.timeout_seconds)" in said


def test_other_errors_are_no_hang() -> None:
    assert hang_behind(RuntimeError("out of memory"), 0, 1.0) is None


def patience_of_the_engine(world: World) -> timedelta:
    model = torch.nn.Linear(2, 2)
    group: dict[str, Any] = {"params": list(model.parameters()), "lr": 0.0, "weight_decay": 0.0}
    config = ParallelConfig(zero_stage=1, timeout_seconds=7)
    options: Any = {"betas": (0.9, 0.95), "eps": 1e-8, "gradient_clipping": 0.0, "accumulation": 1}
    Engine(model, [group], config, world, device=world.device, **options)
    from deepspeed.utils import groups

    backend: Any = groups._get_data_parallel_group()._get_backend(torch.device("cpu"))
    patience: timedelta = backend.options._timeout
    return patience


def test_the_engines_own_groups_wait_no_longer_than_the_others() -> None:
    assert run_ranks(patience_of_the_engine, 1) == [timedelta(seconds=7)]
