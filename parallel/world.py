"""The ranks of a run: joining them, and leaving in order."""

import gc
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Literal

import torch
import torch.distributed as dist

from parallel.config import ParallelConfig
from parallel.placement import LOOPBACK, Placement, world_from_environment

__all__ = ["Device", "Placement", "World", "join_world", "leave_world", "world_from_environment"]

Device = Literal["auto", "cpu", "cuda"]
_POLL_SECONDS = 0.05
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


def join_world(config: ParallelConfig, device: Device = "auto") -> World:
    """Meet the other ranks and create the default process group.

    Waits config.start_timeout_seconds at most. Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT (deepspeed looks for MPI without them), on a CPU DS_ACCELERATOR, and torch's
    thread count.

    Raises ValueError when the launcher started another number of ranks than data x sequence, ConnectionError
    when rank 0 or a peer cannot be reached.
    """
    placement = world_from_environment(os.environ)
    if placement.size != config.world_size:
        raise ValueError(
            f"parallel.data={config.data} x parallel.sequence={config.sequence} wants {config.world_size} "
            f"ranks but {_launcher_in_words(placement)} {placement.size}; change the degrees, or start as "
            "many processes"
        )
    torch_device = _device(device, placement)
    backend = (
        config.backend if config.backend != "auto" else ("nccl" if torch_device.type == "cuda" else "gloo")
    )
    if backend == "nccl" and torch_device.type != "cuda":
        raise ValueError("parallel.backend=nccl needs GPUs; this run is on the CPU: use gloo or auto")
    torch.set_num_threads(config.threads_per_rank or _threads(placement))
    with _environment_kept_on_failure(placement, torch_device):
        store = _meet(placement, config.start_timeout_seconds)
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


def leave_world() -> None:
    """Destroy all process groups, if there are any, and put the environment back.

    A process that ends with live gloo threads may abort: call this at the end of every run.
    """
    if dist.is_available() and dist.is_initialized():
        gc.collect()  # sends that an exception keeps alive hold their group
        dist.destroy_process_group()
    _restore_environment()


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
    if placement.cores is not None:
        return placement.cores
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, cores // placement.local_size)


def _meet(placement: Placement, timeout_seconds: float) -> dist.Store:
    """A store that all ranks have reached, or a ConnectionError that names what is missing."""
    if placement.size == 1:
        return dist.HashStore()
    deadline = time.monotonic() + timeout_seconds
    address = _resolved(placement)
    store: dist.Store
    if placement.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = _serve(address, placement, timeout_seconds)
    else:
        store = _connect(address, placement, deadline, timeout_seconds)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"kvm-dist/{attempt}", store)
    _wait_for_peers(store, placement, address, deadline, timeout_seconds)
    return store


def _resolved(placement: Placement) -> str:
    """The first address whose name resolves."""
    for address in placement.addresses:
        try:
            socket.getaddrinfo(address, placement.port, type=socket.SOCK_STREAM)
        except OSError:
            continue
        return address
    raise ConnectionError(
        f"rank {placement.rank}: MASTER_ADDR={' or '.join(placement.addresses)} cannot be resolved; "
        "set MASTER_ADDR to a name or address of rank 0's machine that every machine knows"
    )


def _serve(address: str, placement: Placement, timeout_seconds: float) -> dist.Store:
    """Rank 0 listens on MASTER_ADDR itself, never on all interfaces."""
    family, _, _, _, target = socket.getaddrinfo(address, placement.port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConnectionError(
            f"rank 0 cannot listen on MASTER_ADDR={address} MASTER_PORT={placement.port}: {error.strerror}; "
            "choose a free MASTER_PORT and a MASTER_ADDR of the machine that runs rank 0"
        ) from error
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        world_size=None,
        is_master=True,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _connect(address: str, placement: Placement, deadline: float, timeout_seconds: float) -> dist.Store:
    """Knock until rank 0 listens (torch's own retries print pages), then open the store."""
    problem: BaseException | None = None
    while time.monotonic() < deadline:
        left = max(deadline - time.monotonic(), 1.0)
        try:
            socket.create_connection((address, placement.port), timeout=left).close()
        except OSError as error:
            problem = error
            time.sleep(_POLL_SECONDS)
            continue
        # Waits for ever on a stranger that accepts and is silent: hence a thread that may be left behind.
        opening: Future[dist.Store] = Future()
        Thread(target=_open_store, args=(opening, address, placement.port, left), daemon=True).start()
        try:
            return opening.result(left)
        except FutureTimeout:
            problem = FutureTimeout("it accepts connections and says nothing")
        except RuntimeError as error:
            problem = error
    raise ConnectionError(
        f"rank {placement.rank} has not reached rank 0 at MASTER_ADDR={address} MASTER_PORT={placement.port} "
        f"in {timeout_seconds:g} s (parallel.start_timeout_seconds): is rank 0 running there? Last answer: "
        f"{str(problem).splitlines()[0] if problem else 'none'}"
    )


def _open_store(opening: "Future[dist.Store]", address: str, port: int, timeout_seconds: float) -> None:
    timeout = timedelta(seconds=timeout_seconds)
    try:
        opening.set_result(dist.TCPStore(address, port, None, False, timeout, wait_for_workers=False))
    except RuntimeError as error:
        opening.set_exception(error)


def _wait_for_peers(
    store: dist.Store, placement: Placement, address: str, deadline: float, timeout_seconds: float
) -> None:
    """Everybody signs in; whoever gives up first tells the others whom it missed."""
    try:
        store.set(f"here/{placement.rank}", f"{socket.gethostname()} pid {os.getpid()}")
        store.add("arrived", 1)
        while store.add("arrived", 0) < placement.size:
            if time.monotonic() > deadline or store.check(["missing"]):
                _report_missing(store, placement, timeout_seconds)
            time.sleep(_POLL_SECONDS)
    except RuntimeError as error:
        raise ConnectionError(
            f"rank {placement.rank}: whoever listens at MASTER_ADDR={address} MASTER_PORT={placement.port} "
            f"does not answer as rank 0 of this run, or has ended ({str(error).splitlines()[0]}); see rank "
            "0's log, or choose another MASTER_PORT"
        ) from error


def _report_missing(store: dist.Store, placement: Placement, timeout_seconds: float) -> None:
    missing = [str(rank) for rank in range(placement.size) if not store.check([f"here/{rank}"])]
    store.set("missing", ",".join(missing))
    if placement.rank == 0:
        time.sleep(10 * _POLL_SECONDS)  # the store ends with rank 0: let the others read
    raise ConnectionError(
        f"rank {placement.rank} of {placement.size}: rank {', '.join(missing)} did not appear in "
        f"{timeout_seconds:g} s (parallel.start_timeout_seconds); see its log, or check that WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT are the same for all"
    )


@contextmanager
def _environment_kept_on_failure(placement: Placement, device: torch.device) -> Iterator[None]:
    address = placement.addresses[0]
    variables = {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(placement.port),
    }
    if device.type == "cpu":
        variables["DS_ACCELERATOR"] = "cpu"
    if address == LOOPBACK and placement.local_size == placement.size and os.path.isdir("/sys/class/net/lo"):
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # one machine: nothing listens to the outside
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
