"""The process groups of a grid of ranks, and how their members come to know each other."""

import threading
from collections.abc import Iterator
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel import mesh as meshes
from parallel.config import ParallelConfig
from parallel.mesh import Mesh
from parallel.world import World
from tests.support.ranks import Ranks

SILENCE_SECONDS = 20


def groups_of(world: World, data: int, sequence: int, head_parallel: int) -> dict[str, list[int]]:
    config = ParallelConfig(data=data, sequence=sequence, head_parallel=head_parallel, timeout_seconds=30)
    mesh = Mesh.build(world, config)
    groups = {name: getattr(mesh, name) for name in ("forward", "backward", "row", "node")}
    assert len({id(one) for one in groups.values()}) == len(groups)  # none waits behind another
    assert mesh.turned().node is mesh.node
    return {name: dist.get_process_group_ranks(one) for name, one in groups.items() if one is not None}


@pytest.mark.parametrize(("data", "sequence", "head_parallel"), [(1, 4, 2), (2, 2, 2), (1, 4, 4), (2, 2, 1)])
def test_rows_and_nodes_have_groups_of_their_own(
    data: int, sequence: int, head_parallel: int, four_ranks: Ranks
) -> None:
    for rank, found in enumerate(four_ranks.run(groups_of, data, sequence, head_parallel)):
        row = list(range(rank // sequence * sequence, rank // sequence * sequence + sequence))
        first = rank // head_parallel * head_parallel
        wanted = {"forward": row, "backward": row, "row": row}
        nodes = {"node": list(range(first, first + head_parallel))} if head_parallel > 1 else {}
        assert found == wanted | nodes


class Rendezvous:
    """A library in which a sender waits for its taker, as in NCCL at the first message of a pair."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: dict[tuple[int, int], Queue[None]] = {}
        self.taken: dict[tuple[int, int], Queue[None]] = {}
        for source in range(size):
            for to in range(size):
                self.sent[source, to], self.taken[source, to] = Queue(), Queue()
        self.met: set[tuple[int, int]] = set()
        self.own = threading.local()

    def get_rank(self, group: Any) -> int:
        return int(self.own.rank)

    def get_world_size(self, group: Any) -> int:
        return self.size

    def get_global_rank(self, group: Any, rank: int) -> int:
        return rank

    def send(self, number: torch.Tensor, to: int, group: Any) -> None:
        self.sent[self.own.rank, to].put(None)
        self.taken[self.own.rank, to].get(timeout=SILENCE_SECONDS)

    def recv(self, number: torch.Tensor, source: int, group: Any) -> None:
        self.sent[source, self.own.rank].get(timeout=SILENCE_SECONDS)
        self.taken[source, self.own.rank].put(None)
        self.met.add((source, self.own.rank))


def distances() -> Iterator[tuple[int, int]]:
    for size in (2, 3, 4, 5, 8, 12):
        for step in (1, 2, 3, 4):
            if size % step == 0 and step < size:
                yield size, step
                yield size, -step


@pytest.mark.parametrize(("size", "distance"), list(distances()))
def test_ranks_connect_though_each_waits_for_the_other(
    size: int, distance: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, failures = Rendezvous(size), []
    monkeypatch.setattr(meshes, "dist", library)
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    group: Any = None

    def connect(rank: int) -> None:
        library.own.rank = rank
        try:
            meshes._connect(world, group, distance)
        except Exception as error:  # of the thread: told below
            failures.append((rank, error))

    threads = [threading.Thread(target=connect, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SILENCE_SECONDS)
    assert not failures
    assert library.met == {(rank, rank + distance) for rank in range(size) if 0 <= rank + distance < size}
