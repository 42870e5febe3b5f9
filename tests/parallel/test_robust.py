"""What happens when a neighbour stops, or sends what nobody asked for: a named error, never a hang."""

import math
import os
import re
import signal
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.loss import token_losses
from parallel import collectives
from parallel.config import ParallelConfig
from parallel.mesh import Mesh
from parallel.sequence.context import Exchange
from parallel.sequence.exchange import RankExchange
from parallel.sequence.ranks import RankedSequence
from parallel.sequence.recorded import RecordedExchange
from parallel.world import World, leave_world
from tests.models.tiny import tiny_batch, tiny_model
from tests.support.logical_ranks import run_logical_ranks
from tests.support.ranks import RankFailure, Ranks

SHARD = 32
LARGE = 64 * 2**20  # bytes: more than the buffers of a connection hold
PATIENCE_SECONDS = 10  # for a rank that runs on a busy machine


class StopsBefore(RecordedExchange):
    """A rank that is stopped, as by a debugger or a host that freezes, before it sends a message."""

    def __init__(self, exchange: Exchange, rank: int, name: str) -> None:
        super().__init__(exchange, rank)
        self.name = name

    def send_next(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._stop_before(name)
        super().send_next(name, tensors)

    def send_previous(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        self._stop_before(name)
        super().send_previous(name, tensors)

    def _stop_before(self, name: str) -> None:
        if name == self.name:
            os.kill(os.getpid(), signal.SIGSTOP)


def train_beside_a_stopped_rank(world: World, name: str) -> None:
    mesh = Mesh.build(world, ParallelConfig(sequence=2, timeout_seconds=PATIENCE_SECONDS))
    exchange = RankExchange(mesh)
    start = SHARD * mesh.sequence_rank
    ids, labels = tiny_batch(2 * SHARD)
    own = slice(start, start + SHARD)
    stopping = StopsBefore(exchange, mesh.sequence_rank, name)
    logits = tiny_model(["kvm", "rwkv7"])(ids[:, own], RankedSequence(mesh, start, stopping))
    token_losses(logits, labels[:, own])[0].backward()
    exchange.drain()


@pytest.mark.parametrize(
    ("name", "waits", "source", "direction"),
    [
        ("1.rwkv7.state", 1, 0, "forward"),
        ("0.kvm.slots.gradient", 0, 1, "backward"),
    ],
)
def test_a_stopped_neighbour_ends_in_a_time_out_that_names_a_message(
    name: str, waits: int, source: int, direction: str
) -> None:
    """The one that it stopped before, or an earlier one: what is not taken yet stops with its sender."""
    with pytest.raises(RankFailure) as caught, Ranks(2) as ranks:
        ranks.run(train_beside_a_stopped_rank, name, timeout_seconds=60)
    here = rf"TimeoutError: sequence rank {waits} \(rank {waits}\)"
    problem = (
        rf"nothing came from rank {source} for '[01]\.\w+\.[\w. ]+' \({direction}\) in {PATIENCE_SECONDS} s"
    )
    assert re.search(f"{here}: {problem}", str(caught.value))


def send_to_a_stopped_rank(world: World) -> None:
    mesh = Mesh.build(world, ParallelConfig(sequence=2, timeout_seconds=PATIENCE_SECONDS))
    exchange = RankExchange(mesh)
    if mesh.sequence_rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    exchange.send_next("3.kvm.keys", (torch.zeros(LARGE, dtype=torch.uint8),))
    exchange.drain()


def test_a_message_that_a_stopped_rank_does_not_take_is_a_time_out_of_the_sender() -> None:
    with pytest.raises(RankFailure, match=r"rank 0 failed") as caught, Ranks(2) as ranks:
        ranks.run(send_to_a_stopped_rank, timeout_seconds=60)
    assert (
        f"TimeoutError: sequence rank 0 (rank 0): rank 1 has not taken '3.kvm.keys' in {PATIENCE_SECONDS} s"
        in str(caught.value)
    )


def send_to_a_rank_that_has_left(world: World) -> str:
    mesh = Mesh.build(world, ParallelConfig(sequence=2, timeout_seconds=PATIENCE_SECONDS))
    exchange = RankExchange(mesh)
    if mesh.sequence_rank == 1:
        leave_world()
        return ""
    try:
        for _ in range(10_000):  # it is not known at once
            exchange.send_next("3.kvm.keys", (torch.zeros(1),))
            time.sleep(0.001)
    except ConnectionError as error:
        return str(error)
    return "sent"


def test_a_rank_that_has_left_is_named_by_who_sends_to_it() -> None:
    with Ranks(2) as ranks:
        said, _ = ranks.run(send_to_a_rank_that_has_left)
    assert said.startswith("sequence rank 0 (rank 0): rank 1 has not taken '3.kvm.keys': ")


def send_what_nobody_wants(world: World) -> None:
    mesh = Mesh.build(world, ParallelConfig(sequence=2, timeout_seconds=PATIENCE_SECONDS))
    exchange = RankExchange(mesh)
    if exchange.has_next:
        exchange.send_next("0.kvm.more", (torch.zeros(2),))
        exchange.drain()
    collectives.barrier()


def test_a_message_that_nobody_wants_is_a_time_out_at_the_end_of_the_step() -> None:
    with pytest.raises(RankFailure, match=r"rank 0 failed") as caught, Ranks(2) as ranks:
        ranks.run(send_what_nobody_wants, timeout_seconds=60)
    assert (
        f"TimeoutError: sequence rank 0 (rank 0): rank 1 has not taken '0.kvm.more' in {PATIENCE_SECONDS} s"
        in str(caught.value)
    )


def test_a_logical_rank_that_leaves_a_message_behind_is_caught() -> None:
    def work(rank: int, exchange: Exchange) -> None:
        if exchange.has_next:
            exchange.send_next("0.kvm.keys", (torch.zeros(2),))
            exchange.send_next("0.kvm.more", (torch.zeros(2),))
        else:
            exchange.receive_previous("0.kvm.keys", (torch.zeros(2),))

    with pytest.raises(AssertionError, match=r"rank 1 has not taken '0\.kvm\.more'"):
        run_logical_ranks(2, work)


def test_logical_ranks_that_do_not_agree_on_the_order_are_caught() -> None:
    def work(rank: int, exchange: Exchange) -> None:
        names = ("0.kvm.keys", "0.kvm.values")
        for name in names if exchange.has_next else reversed(names):
            if exchange.has_next:
                exchange.send_next(name, (torch.zeros(2),))
            else:
                exchange.receive_previous(name, (torch.zeros(2),))

    with pytest.raises(AssertionError, match=r"wanted 0\.kvm\.values, got 0\.kvm\.keys"):
        run_logical_ranks(2, work)


def diverged_after(world: World, checked: float) -> str:
    """Ranks agree on three messages and not on the fourth; what the receiver says."""
    mesh = Mesh.build(world, ParallelConfig(sequence=2, timeout_seconds=20))
    exchange = RankExchange(mesh, checked_messages=checked)
    said = "nothing"
    for number in range(4):
        like = (torch.full((4,), float(number)),)
        if exchange.has_next:
            exchange.send_next("stray" if number == 3 else f"{number}.state", like)
            continue
        try:
            (arrived,) = exchange.receive_previous(f"{number}.state", like)
            assert torch.equal(arrived, like[0])
        except ValueError as error:
            said = str(error)
    collectives.barrier()
    return said


@pytest.mark.parametrize("checked", [0, 3])
def test_orders_are_compared_for_no_more_messages_than_wanted(two_ranks: Ranks, checked: int) -> None:
    assert two_ranks.run(diverged_after, checked)[1] == "nothing"


def test_orders_are_compared_for_as_many_messages_as_wanted() -> None:
    with Ranks(2) as ranks:
        said = ranks.run(diverged_after, 4)[1]
    assert "wanted '3.state' of 16 bytes from rank 0, got 'stray' of 16 bytes" in said


def checked_by_default(world: World, backend: str) -> float:
    mesh = Mesh.build(world, ParallelConfig(sequence=2, timeout_seconds=20))
    mesh = replace(mesh, world=replace(world, backend=backend))
    return RankExchange(mesh).checked_messages


def test_labels_go_with_all_messages_on_gloo_and_with_those_of_the_first_steps_elsewhere(
    two_ranks: Ranks,
) -> None:
    assert two_ranks.run(checked_by_default, "gloo") == [math.inf] * 2
    assert two_ranks.run(checked_by_default, "nccl") == [2000] * 2
