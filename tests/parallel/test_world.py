import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel import collectives
from parallel.config import ParallelConfig
from parallel.meeting import _connect, _resolved, _serve, prepare_after_first, wait_until_ready
from parallel.mesh import Mesh
from parallel.placement import Placement, first_host, world_from_environment
from parallel.world import (
    World,
    _device,
    _environment_kept_on_failure,
    _threads,
    join_world,
    leave_world,
)
from tests.support.ranks import RankFailure, Ranks, free_port

ONE = ParallelConfig(start_timeout_seconds=1)
TWO = ParallelConfig(data=2, start_timeout_seconds=1)
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
SLURM |= {"SLURM_NTASKS": "5", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
SLURM |= {"SLURM_STEP_NODELIST": "gpu[007-008,12]", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
TORCHRUN |= {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}
SUBMITIT = {"SUBMITIT_LOCAL_GLOBALRANK": "1", "SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_LOCALID": "1"}
SUBMITIT |= {"SUBMITIT_LOCAL_JOB_ID": "123", "SUBMITIT_LOCAL_NNODES": "1"}


def test_torchrun_places_a_rank() -> None:
    placement = world_from_environment(TORCHRUN)
    assert placement == Placement(5, 8, 1, 4, 1, ("head",), 29500, None, "torchrun")


def test_slurm_places_a_rank_on_nodes_of_unequal_task_counts() -> None:
    placement = world_from_environment(SLURM)
    assert (placement.rank, placement.size, placement.local_rank, placement.local_size) == (3, 5, 1, 2)
    assert placement.node == 1
    assert placement.addresses == ("gpu007", "10.0.0.7")
    assert world_from_environment(SLURM | {"SLURM_NODEID": "2", "SLURM_LOCALID": "0"}).local_size == 1


def test_submitit_places_a_rank_of_its_local_executor() -> None:
    placement = world_from_environment(SUBMITIT)
    assert (placement.rank, placement.size, placement.local_rank, placement.local_size) == (1, 2, 1, 2)
    assert placement.addresses == ("127.0.0.1",)


def test_every_task_of_a_step_derives_the_same_port() -> None:
    ports = {world_from_environment(SLURM | {"SLURM_PROCID": str(rank)}).port for rank in range(5)}
    assert len(ports) == 1
    assert 1024 < ports.pop() < 32768
    assert world_from_environment(SLURM | {"MASTER_PORT": "4242"}).port == 4242


def test_torchrun_comes_before_submitit_and_submitit_before_slurm() -> None:
    assert world_from_environment(TORCHRUN | SUBMITIT | SLURM).launcher == "torchrun"
    assert world_from_environment(SUBMITIT | SLURM).launcher == "submitit"
    assert world_from_environment(SLURM).launcher == "slurm"


def test_without_a_launcher_there_is_one_process() -> None:
    assert world_from_environment({"HOME": "/", "SLURM_CONF": "/etc/slurm.conf"}) == Placement()


def test_the_shell_of_a_batch_script_is_no_task() -> None:
    assert (
        world_from_environment({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == Placement()
    )


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("gpu[3,5]", "gpu3"),
        ("r[1-2]n[1-4]", "r1n1"),
        ("n[08-11]-ib", "n08-ib"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT is not set"),
        ({"RANK": "zero", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "RANK='zero' is not an integer"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "give rank 2 of 2"),
    ],
)
def test_incomplete_or_wrong_variables_are_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        world_from_environment(environment)


def test_a_rank_that_is_bound_to_fewer_cores_than_it_was_given_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    placement = world_from_environment(SLURM | {"SLURM_CPUS_PER_TASK": "8"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert _threads(placement) == 8
    assert caplog.text == ""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    assert _threads(placement) == 1
    assert "rank 3 may run on 1 CPU cores, though slurm gave it 8" in caplog.text


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No launcher's variables; whatever a test joins is left."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SUBMITIT_", "MASTER_", "LOCAL_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    yield monkeypatch
    leave_world()
    torch.set_num_threads(threads)


def test_one_process_joins_and_leaves_its_world(alone: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    world = join_world(ONE.model_copy(update={"threads_per_rank": 1}), "cpu")
    assert world == World(0, 1, 0, 1, 0, torch.device("cpu"), "gloo")
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("0", "1", "0")
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert torch.get_num_threads() == 1
    assert collectives.any_rank(True)
    leave_world()
    assert not dist.is_initialized()
    assert dict(os.environ) == before


def test_a_rank_is_prepared_before_there_is_a_group_to_wait_in(alone: pytest.MonkeyPatch) -> None:
    prepared = []
    world = join_world(ONE, "cpu", lambda device: prepared.append((device, dist.is_initialized())))
    assert prepared == [(world.device, False)]


@pytest.mark.parametrize(
    ("backend", "failed", "left"),
    [("gloo", False, True), ("gloo", True, True), ("nccl", False, True), ("nccl", True, False)],
)
def test_after_a_failure_nobody_waits_for_messages_that_nccl_has_no_taker_for(
    backend: str, failed: bool, left: bool, alone: pytest.MonkeyPatch
) -> None:
    destroyed: list[bool] = []
    join_world(ONE, "cpu")
    alone.setattr("parallel.world.dist.get_backend", lambda: backend)
    with alone.context() as patched:
        patched.setattr("parallel.world.dist.destroy_process_group", lambda: destroyed.append(True))
        with suppress(ZeroDivisionError):
            try:
                assert not (1 / 0 if failed else 0)
            finally:
                leave_world()
    assert bool(destroyed) is left
    assert "DS_ACCELERATOR" not in os.environ  # put back in any case


def test_who_makes_a_communicator_first_waits_as_long_as_for_a_collective(alone: pytest.MonkeyPatch) -> None:
    join_world(ParallelConfig(start_timeout_seconds=1, timeout_seconds=77), "cpu")
    store = dist.distributed_c10d._get_default_store()
    assert store.timeout == timedelta(seconds=77)


@pytest.mark.parametrize(("visible", "number"), [(1, 0), (4, 2)])
def test_the_engine_takes_the_gpu_that_the_rank_has(
    visible: int, number: int, alone: pytest.MonkeyPatch
) -> None:
    """deepspeed calls set_device(LOCAL_RANK)."""
    taken: list[int] = []
    alone.setattr(torch.cuda, "is_available", lambda: True)
    alone.setattr(torch.cuda, "device_count", lambda: visible)
    alone.setattr(torch.cuda, "set_device", taken.append)
    placement = Placement(rank=6, size=8, local_rank=2, local_size=4, node=1)
    device = _device("cuda", placement)
    with _environment_kept_on_failure(placement, device):
        assert (taken, device.index, os.environ["LOCAL_RANK"]) == ([number], number, str(number))


def test_gloo_is_not_given_the_memory_of_a_gpu_to_send(alone: pytest.MonkeyPatch) -> None:
    """It would read it as its own."""
    alone.setattr("parallel.world._device", lambda wanted, placement: torch.device("cuda", 0))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        alone.setenv(name, value)
    with pytest.raises(ValueError, match="use nccl or auto"):
        join_world(ParallelConfig(sequence=2, backend="gloo"), "cuda")


@pytest.mark.parametrize("local_size", [8, 4])
def test_on_one_machine_nothing_listens_to_the_outside(local_size: int, alone: pytest.MonkeyPatch) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        alone.delenv(name, raising=False)
    placement = Placement(rank=0, size=8, local_rank=0, local_size=local_size)
    with _environment_kept_on_failure(placement, torch.device("cpu")):
        assert [os.environ.get(name) for name in names] == [None if local_size < 8 else "lo"] * 2


def test_on_a_gpu_too_the_host_waits_for_others_where_their_numbers_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    for is_cuda in (False, True):
        tensor: Any = SimpleNamespace(is_cuda=is_cuda, device="cuda:0")
        collectives._wait_for(tensor)
    assert waited == ["stream"]


def two_ranks() -> list[Placement]:
    return [Placement(rank, 2, rank, 2, 0, ("127.0.0.1",), 29500, None, "torchrun") for rank in range(2)]


def test_ranks_wait_for_one_that_prepares_longer() -> None:
    store, (first, second) = dist.HashStore(), two_ranks()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait_until_ready, store, first, 30)
        while not store.check(["ready/0"]):
            time.sleep(0.01)
        assert not waiting.done()
        wait_until_ready(store, second, 30)
        waiting.result(30)


def test_one_rank_of_each_node_prepares_before_the_others() -> None:
    """They find what it compiled, and choose by what it measured."""
    store, ended = dist.HashStore(), list[int]()
    ranks = [Placement(rank, 4, rank % 2, 2, rank // 2) for rank in range(4)]
    may_end = threading.Event()

    def prepare(rank: int) -> None:
        if rank == 0:
            may_end.wait(30)
        ended.append(rank)

    with ThreadPoolExecutor(4) as pool:
        first, second, third, fourth = (
            pool.submit(prepare_after_first, store, one, partial(prepare, one.rank), 30) for one in ranks
        )
        third.result(30)
        fourth.result(30)
        assert ended == [2, 3]
        assert not second.done()
        may_end.set()
        first.result(30)
        second.result(30)
    assert ended == [2, 3, 0, 1]


def test_a_first_rank_of_a_node_that_never_is_ready_is_named() -> None:
    with pytest.raises(ConnectionError, match=r"rank 5: rank 4, the first of its node, is not ready"):
        prepare_after_first(dist.HashStore(), Placement(5, 8, 1, 4, 1), lambda: None, 0.1)


def test_a_rank_that_never_is_ready_is_named_to_all() -> None:
    ranks = [replace(one, size=3) for one in two_ranks()]
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(wait_until_ready, store, one, 0.2 + 60 * one.rank) for one in ranks]
        for one in waiting:  # the second gives up with the first
            with pytest.raises(ConnectionError, match=r"rank 2 is not ready .*compile_timeout_seconds"):
                one.result(30)


@pytest.mark.parametrize(
    ("per_rank", "variable", "threads"),
    [(None, "3", 3), (None, "3,1", 3), (None, None, 5), (None, "", 5), (2, "3", 2)],
)
def test_threads_are_configured_or_of_the_environment_or_a_share_of_the_cores(
    alone: pytest.MonkeyPatch, per_rank: int | None, variable: str | None, threads: int
) -> None:
    alone.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
    if variable is None:
        alone.delenv("OMP_NUM_THREADS", raising=False)
    else:
        alone.setenv("OMP_NUM_THREADS", variable)
    join_world(ONE.model_copy(update={"threads_per_rank": per_rank}), "cpu")
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("variable", ["many", "0", "-2", "2 3"])
def test_threads_that_are_no_number_are_refused(alone: pytest.MonkeyPatch, variable: str) -> None:
    alone.setenv("OMP_NUM_THREADS", variable)
    with pytest.raises(ValueError, match=f"OMP_NUM_THREADS='{variable}' is no number of threads"):
        join_world(ONE, "cpu")


def test_another_number_of_ranks_than_the_config_wants_is_refused(alone: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"parallel\.data=2 x parallel\.sequence=1 wants 2 ranks"):
        join_world(TWO, "cpu")


def test_nccl_is_refused_on_a_cpu(alone: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"parallel\.backend=nccl needs GPUs"):
        join_world(ParallelConfig(backend="nccl"), "cpu")


def start(patch: pytest.MonkeyPatch, rank: int, address: str, port: int) -> None:
    """What `rank` of two says when it cannot start."""
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port}.items():
        patch.setenv(name, str(value))
    join_world(TWO, "cpu")


def test_a_missing_peer_is_named(alone: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionError, match=r"rank 0 of 2: rank 1 did not appear in 1 s"):
        start(alone, 0, "127.0.0.1", free_port())


def test_a_missing_first_rank_is_named_with_its_address(alone: pytest.MonkeyPatch) -> None:
    port = free_port()
    with pytest.raises(
        ConnectionError, match=rf"not reached rank 0 at MASTER_ADDR=127\.0\.0\.1 MASTER_PORT={port}"
    ):
        start(alone, 1, "127.0.0.1", port)


def test_a_taken_port_is_named(alone: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            ConnectionError, match=rf"cannot listen on .*MASTER_PORT={port}: Address already in use"
        ):
            start(alone, 0, "127.0.0.1", port)


def test_a_port_where_something_else_answers_is_named(alone: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        begun = time.monotonic()
        with pytest.raises(ConnectionError, match=rf"MASTER_PORT={other.getsockname()[1]}"):
            start(alone, 1, "127.0.0.1", other.getsockname()[1])
    assert time.monotonic() - begun < 30  # the promise for start-up, far from the 1 s configured


@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_that_does_not_resolve_is_named(alone: pytest.MonkeyPatch, rank: int) -> None:
    with pytest.raises(ConnectionError, match=r"MASTER_ADDR=nowhere\.invalid cannot be resolved"):
        start(alone, rank, "nowhere.invalid", free_port())


def known_as(addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that resolve as here, and no others."""

    def lookup(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if host not in addresses:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)


@pytest.mark.parametrize(
    ("known", "local_size", "order"),
    [
        ({"gpu007": "127.0.1.1", "10.0.0.7": "10.0.0.7"}, 2, ["10.0.0.7", "gpu007"]),
        ({"gpu007": "10.0.0.7", "10.0.0.7": "10.0.0.7"}, 2, ["gpu007", "10.0.0.7"]),
        ({"10.0.0.7": "10.0.0.7"}, 2, ["10.0.0.7"]),
        ({"gpu007": "127.0.1.1"}, 2, ["gpu007"]),
        ({"gpu007": "::1", "10.0.0.7": "10.0.0.7"}, 4, ["gpu007", "10.0.0.7"]),
    ],
)
def test_a_name_that_means_this_machine_alone_comes_last(
    known: dict[str, str], local_size: int, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known_as(known, monkeypatch)
    assert _resolved(Placement(0, 4, 0, local_size, 0, ("gpu007", "10.0.0.7"), 4242)) == order


def test_a_rank_knocks_at_every_address_of_rank_0() -> None:
    port = free_port()
    server = _serve("127.0.0.1", Placement(0, 2, 0, 1, 0, ("127.0.0.1",), port), 20)
    placement = Placement(1, 2, 0, 1, 1, ("127.0.0.2", "127.0.0.1"), port)
    address, store = _connect(placement.addresses, placement, time.monotonic() + 20, 20)
    assert address == "127.0.0.1"
    store.set("met", "yes")
    assert server.get("met") == b"yes"


def test_an_address_of_another_machine_is_named_by_rank_0(alone: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionError, match=r"cannot listen on MASTER_ADDR=192\.0\.2\.1"):
        start(alone, 0, "192.0.2.1", free_port())


def grid(world: World) -> tuple[int | None, ...]:
    mesh = Mesh.build(world, ParallelConfig(data=2, sequence=2, timeout_seconds=30))
    assert mesh.forward is not None
    assert dist.get_process_group_ranks(mesh.forward) == [mesh.global_rank(0), mesh.global_rank(1)]
    with pytest.raises(ValueError, match="sequence rank 2"):
        mesh.global_rank(2)
    return mesh.data_rank, mesh.sequence_rank, mesh.previous_rank, mesh.next_rank


def test_sequence_ranks_are_innermost_in_the_mesh(four_ranks: Ranks) -> None:
    assert four_ranks.run(grid) == [(0, 0, None, 1), (0, 1, 0, None), (1, 0, None, 3), (1, 1, 2, None)]


def test_a_mesh_of_another_size_than_the_world_is_refused() -> None:
    world = World(0, 1, 0, 1, 0, torch.device("cpu"), "gloo")
    with pytest.raises(ValueError, match="needs 2 ranks, the world has 1"):
        Mesh.build(world, TWO)


def decisions(world: World) -> tuple[object, ...]:
    given = torch.tensor([world.rank + 1.0, -world.rank])
    answers = (
        collectives.sum(given).tolist(),
        collectives.mean(given).tolist(),
        collectives.maximum(given).tolist(),
        collectives.any_rank(world.rank == 3),
        collectives.any_rank(False),
        collectives.broadcast_object({"rank": world.rank}, source=2),
        collectives.gather_objects(world.rank * 10),
    )
    collectives.barrier()
    assert given.tolist() == [world.rank + 1.0, -world.rank]
    return answers


def test_all_ranks_decide_the_same(four_ranks: Ranks) -> None:
    wanted = ([10.0, -6.0], [2.5, -1.5], [4.0, 0.0], True, False, {"rank": 2}, [0, 10, 20, 30])
    assert four_ranks.run(decisions) == [wanted] * 4


def test_without_a_world_one_rank_decides_alone() -> None:
    value = torch.tensor([2.0])
    assert collectives.sum(value).tolist() == collectives.mean(value).tolist() == [2.0]
    assert (collectives.any_rank(True), collectives.any_rank(False)) == (True, False)
    assert collectives.gather_objects("a") == ["a"]
    assert collectives.broadcast_object("b") == "b"


def fail_on_rank_1(world: World) -> int:
    if world.rank == 1:
        raise KeyError("lost")
    return world.rank


def sleep_on_rank_1(world: World) -> None:
    if world.rank == 1:
        time.sleep(600)


def test_the_support_for_ranks_reports_the_failing_rank() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 failed:\n(.|\n)*KeyError: 'lost'"), Ranks(2) as ranks:
        ranks.run(fail_on_rank_1)


def test_the_support_for_ranks_ends_a_silent_rank() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(int_of_rank) == [0, 1]
        with pytest.raises(RankFailure, match=r"no answer from rank \[1\] in 1 s"):
            ranks.run(sleep_on_rank_1, timeout_seconds=1)


def int_of_rank(world: World) -> int:
    return world.rank


def test_finished_runs_of_two_ranks_always_exit_with_0() -> None:
    command = [sys.executable, "-m", "tests.parallel.finished_runs", "10"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0"] * 20
