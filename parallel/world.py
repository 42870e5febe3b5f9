"""The ranks of a run: joining them, and leaving in order."""

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from parallel.allocator import keep_freed_memory
from parallel.config import ParallelConfig
from parallel.meeting import meet, prepare_after_first, wait_until_ready
from parallel.placement import LOOPBACK, Placement, threads_from_environment, world_from_environment

__all__ = ["Device", "Placement", "World", "join_world", "leave_world", "world_from_environment"]

Device = Literal["auto", "cpu", "cuda"]
_log = logging.getLogger(__name__)
_replaced_variables: dict[str, str | None] = {}  # what `join_world` overwrote, put back by `leave_world`


@dataclass(frozen=True)
class World:
    """One rank among `size`. node: index of its machine; device: where its tensors live."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    device: torch.device
    backend: str


def join_world(
    config: ParallelConfig,
    device: Device = "auto",
    prepare: Callable[[torch.device], None] | None = None,
) -> World:
    """Meet the other ranks and create the default process group.

    Waits config.start_timeout_seconds at most. prepare: done by every rank on its device before there is a
    group, first by one of each node; ranks wait config.compile_timeout_seconds for each other to end it.

    Sets RANK, WORLD_SIZE, LOCAL_RANK (deepspeed takes it for the number of the GPU), LOCAL_WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT (deepspeed looks for MPI without them), on a CPU DS_ACCELERATOR, and torch's
    thread count.

    Raises ValueError when the launcher started another number of ranks than data x sequence or a variable is
    wrong, ConnectionError when rank 0 or a peer cannot be reached.
    """
    placement = world_from_environment(os.environ)
    if placement.size != config.world_size:
        raise ValueError(
            f"parallel.data={config.data} x parallel.sequence={config.sequence} wants {config.world_size} "
            f"ranks but {_launcher_in_words(placement)} {placement.size}; change the degrees, or start as "
            "many processes"
        )
    torch_device = _device(device, placement)
    backend = _backend(config, torch_device)
    shared = _threads(placement)
    torch.set_num_threads(config.threads_per_rank or threads_from_environment(os.environ) or shared)
    if torch_device.type == "cpu":
        keep_freed_memory()
    with _environment_kept_on_failure(placement, torch_device):
        store = meet(placement, config.start_timeout_seconds)
        if prepare is not None:
            own = partial(prepare, torch_device)
            prepare_after_first(store, placement, own, config.compile_timeout_seconds)
            wait_until_ready(store, placement, config.compile_timeout_seconds)
        # NCCL's communicators are made through the store at their first use: who comes first waits there.
        store.set_timeout(timedelta(seconds=config.timeout_seconds))
        dist.init_process_group(
            backend,
            store=store,
            rank=placement.rank,
            world_size=placement.size,
            timeout=timedelta(seconds=config.timeout_seconds),
        )
    return World(
        rank=placement.rank,
        size=placement.size,
        local_rank=placement.local_rank,
        local_size=placement.local_size,
        node=placement.node,
        device=torch_device,
        backend=backend,
    )


def _backend(config: ParallelConfig, device: torch.device) -> str:
    on_gpu = device.type == "cuda"
    backend = config.backend if config.backend != "auto" else ("nccl" if on_gpu else "gloo")
    if backend == "nccl" and not on_gpu:
        raise ValueError("parallel.backend=nccl needs GPUs; this run is on the CPU: use gloo or auto")
    if backend == "gloo" and on_gpu and config.sequence > 1:
        raise ValueError(
            "parallel.backend=gloo takes messages between sequence ranks from a CPU's memory; this run is on "
            "GPUs: use nccl or auto"
        )
    return backend


def leave_world() -> None:
    """Destroy all process groups, if there are any, and put the environment back.

    A process that ends with live gloo threads may abort: call this at the end of every run. While an
    exception is on its way, groups of NCCL stay: see `_may_wait`. Who catches it ends by os._exit.
    """
    if dist.is_available() and dist.is_initialized() and _may_wait():
        gc.collect()  # sends that an exception keeps alive hold their group
        dist.destroy_process_group()
    _restore_environment()


def _may_wait() -> bool:
    """Whether all that was sent has a taker.

    NCCL and RCCL destroy a group once its messages have been taken. After a failure nobody takes them: the
    exception would be told to nobody until a watchdog aborts the process.
    """
    return sys.exc_info()[0] is None or dist.get_backend() != "nccl"


def _launcher_in_words(placement: Placement) -> str:
    return (
        "the process was started alone, a world of"
        if placement.launcher == "none"
        else f"{placement.launcher} started"
    )


def _device(wanted: Device, placement: Placement) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            "device=cuda but torch sees no GPU; use device=cpu or auto, or install a GPU build of torch"
        )
    visible = torch.cuda.device_count()
    index = 0 if visible == 1 else placement.local_rank  # a launcher that binds GPUs shows each rank its own
    if index >= visible:
        raise ValueError(
            f"local rank {placement.local_rank} has no GPU of its own: {visible} are visible and "
            f"{placement.local_size} ranks run on this node; start {visible} ranks a node"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _threads(placement: Placement) -> int:
    """A rank's share of the cores; warns where it may not use them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    if placement.cores is None:
        return max(1, cores // placement.local_size)
    if cores < placement.cores:
        _log.warning(
            "rank %d may run on %d CPU cores, though %s gave it %d: something binds it, as SLURM_CPU_BIND "
            "of another job or --cpu-bind in slurm.srun_args; it will be slow",
            placement.rank,
            cores,
            placement.launcher,
            placement.cores,
        )
    return min(placement.cores, cores)


@contextmanager
def _environment_kept_on_failure(placement: Placement, device: torch.device) -> Iterator[None]:
    address = placement.addresses[0]
    variables = {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.size),
        # Where a launcher shows each rank its own GPU alone, that is number 0 of every rank.
        "LOCAL_RANK": str(placement.local_rank if device.index is None else device.index),
        "LOCAL_WORLD_SIZE": str(placement.local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(placement.port),
    }
    if device.type == "cpu":
        variables["DS_ACCELERATOR"] = "cpu"
    if address == LOOPBACK and placement.local_size == placement.size and os.path.isdir("/sys/class/net/lo"):
        # One machine: nothing listens to the outside.
        variables["GLOO_SOCKET_IFNAME"] = variables["NCCL_SOCKET_IFNAME"] = "lo"
    _replaced_variables.update(
        {name: os.environ.get(name) for name in variables if name not in _replaced_variables}
    )
    os.environ.update(variables)
    try:
        yield
    except BaseException:
        _restore_environment()
        raise


def _restore_environment() -> None:
    for name, value in _replaced_variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _replaced_variables.clear()
