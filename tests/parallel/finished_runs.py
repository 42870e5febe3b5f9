"""`python -m tests.parallel.finished_runs N`: N runs of two ranks that train, leave and end; exit codes.

Every rank is a child that ends as an interpreter ends, its threads and static objects included.
"""

import os
import sys

import torch

from parallel.config import ParallelConfig
from parallel.mesh import Mesh
from parallel.sequence.exchange import RankExchange
from parallel.sequence.ranks import RankedSequence
from parallel.world import join_world, leave_world
from tests.parallel.engine_case import Case, engine_step, make_engine
from tests.parallel.toy import toy_net
from tests.support import rank_imports
from tests.support.ranks import free_port

__all__ = ["rank_imports"]  # before the ranks are forked


def run_rank(rank: int, port: int) -> None:
    local = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in local.items()}, MASTER_ADDR="127.0.0.1")
    world = join_world(ParallelConfig(sequence=2, threads_per_rank=1, timeout_seconds=30), "cpu")
    mesh = Mesh.build(world, ParallelConfig(sequence=2, timeout_seconds=30))
    exchange = RankExchange(mesh)
    tokens = torch.ones(1, 4, 5, dtype=torch.float64)
    toy_net()(tokens, RankedSequence(mesh, rank * 4, exchange)).sum().backward()
    exchange.drain()
    case = Case(stage=1)
    engine_step(make_engine(world, case), world, case, 0)
    leave_world()


def main(runs: int) -> None:
    """Returns in every child; the parent prints their exit codes."""
    for _ in range(runs):
        port = free_port()
        children: list[int] = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                run_rank(rank, port)
                return
            children.append(child)
        for child in children:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
