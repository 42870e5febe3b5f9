import time
from datetime import timedelta
from typing import Any

import pytest
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


@pytest.mark.parametrize(
    "said",
    [
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, "
        "NumelIn=2, NumelOut=2, Timeout(ms)=600000) ran for 600011 milliseconds before timing out.",
        "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store "
        "by key '0', but store->get('0') got error: wait timeout after 600000ms, keys: /0//cuda//0",
    ],
)
def test_what_nccl_says_of_a_silent_rank_is_a_hang_too(said: str) -> None:
    found = hang_behind(RuntimeError(said), 1, 600.0)
    assert found is not None
    assert "rank 1: another rank has not joined a collective in 600 s" in str(found)


@pytest.mark.parametrize(
    "said", ["out of memory", "NCCL error: remote process exited or there was a network error"]
)
def test_other_errors_are_no_hang(said: str) -> None:
    assert hang_behind(RuntimeError(said), 0, 1.0) is None


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
