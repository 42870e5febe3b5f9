"""Which process group carries what: between two ranks, each group has messages of one way only."""

from collections import defaultdict
from datetime import timedelta
from typing import Any

import pytest
import torch

from parallel.mesh import Mesh
from parallel.sequence import exchange as exchanges
from parallel.sequence.exchange import RankExchange
from parallel.sequence.problems import wait_for
from parallel.world import World

SIZE = 4


class Arrived:
    def __init__(self) -> None:
        self.waited: list[tuple[Any, ...]] = []

    def wait(self, *timeout: Any) -> None:
        """At once."""
        self.waited.append(timeout)


def exchange_of(rank: int, turned: bool) -> RankExchange:
    world = World(rank, SIZE, rank, SIZE, 0, torch.device("cpu"), "nccl")
    groups: dict[str, Any] = {"forward": "forward", "backward": "backward"}
    mesh = Mesh(world, 0, 1, rank, SIZE, 10.0, **groups)
    return RankExchange(mesh.turned() if turned else mesh, checked_messages=0)


@pytest.mark.parametrize(("backend", "given"), [("gloo", (timedelta(seconds=10),)), ("nccl", ())])
def test_the_host_does_not_stand_still_for_what_the_device_waits_for(
    backend: str, given: tuple[timedelta, ...]
) -> None:
    """NCCL's `wait` lets the host go on unless it is given a time-out."""
    world = World(0, SIZE, 0, SIZE, 0, torch.device("cpu"), backend)
    work: Any = Arrived()
    wait_for(work, Mesh(world, 0, 1, 0, SIZE, 10.0), "nothing came")
    assert work.waited == [given]


@pytest.mark.parametrize("turned", [False, True])
def test_two_ranks_that_send_to_each_other_share_no_group(
    turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, received = defaultdict(list), defaultdict(list)
    at = 0

    def isend(buffer: torch.Tensor, to: int, group: str) -> Arrived:
        sent[at, to].append(group)
        return Arrived()

    def irecv(buffer: torch.Tensor, source: int, group: str) -> Arrived:
        received[source, at].append(group)
        return Arrived()

    monkeypatch.setattr(exchanges.dist, "isend", isend)
    monkeypatch.setattr(exchanges.dist, "irecv", irecv)
    message = (torch.zeros(3),)
    for at in range(SIZE):
        exchange = exchange_of(at, turned)
        for place in set(range(SIZE)) - {exchange._mesh.sequence_rank}:
            exchange.send_to(place, "part", message)
            exchange.receive_from(place, "part", message)
        if exchange.has_next:
            exchange.send_next("state", message)
            exchange.receive_next("gradient", message)
        if exchange.has_previous:
            exchange.send_previous("gradient", message)
            exchange.receive_previous("state", message)
    assert sent == received
    assert len(sent) == SIZE * (SIZE - 1)
    for (source, to), groups in sent.items():
        assert set(groups) == {"forward" if source < to else "backward"}  # turned or not
