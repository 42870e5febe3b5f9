"""How ranks find each other at start, and say whom they miss."""

import ipaddress
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread

import torch.distributed as dist

from parallel.placement import Placement

_POLL_SECONDS = 0.05
_LONGEST_POLL_SECONDS = 0.5
_KNOCK_SECONDS = 3.0  # at one address, where there are several


def meet(placement: Placement, timeout_seconds: float) -> dist.Store:
    """A store that all ranks have reached, or a ConnectionError that names what is missing."""
    if placement.size == 1:
        return dist.HashStore()
    deadline = time.monotonic() + timeout_seconds
    addresses = _resolved(placement)
    store: dist.Store
    if placement.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        address = addresses[0]
        store = _serve(address, placement, timeout_seconds)
    else:
        address, store = _connect(addresses, placement, deadline, timeout_seconds)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"kvm-dist/{attempt}", store)
    _wait_for_peers(store, placement, address, deadline, timeout_seconds)
    return store


def _resolved(placement: Placement) -> list[str]:
    """The addresses whose names resolve, best first.

    Where there are ranks on other machines, names that mean this machine to itself alone come last: many a
    node knows its own name as 127.0.1.1, where nobody else could reach it.
    """
    here: list[str] = []
    found: list[str] = []
    for address in placement.addresses:
        try:
            known = socket.getaddrinfo(address, placement.port, type=socket.SOCK_STREAM)
        except OSError:
            continue
        loopback = ipaddress.ip_address(str(known[0][4][0]).partition("%")[0]).is_loopback
        (here if loopback and placement.local_size < placement.size else found).append(address)
    if found or here:
        return found + here
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


def _connect(
    addresses: Sequence[str], placement: Placement, deadline: float, timeout_seconds: float
) -> tuple[str, dist.Store]:
    """Knock until rank 0 listens (torch's own retries print pages), then open the store; where that was."""
    problem: BaseException | None = None
    for address in itertools.cycle(addresses):
        if time.monotonic() >= deadline:
            break
        left = max(deadline - time.monotonic(), 1.0)
        try:
            patience = left if len(addresses) == 1 else min(left, _KNOCK_SECONDS)
            socket.create_connection((address, placement.port), timeout=patience).close()
        except OSError as error:
            problem = error
            time.sleep(_POLL_SECONDS)
            continue
        # Waits for ever on a stranger that accepts and is silent: hence a thread that may be left behind.
        opening: Future[dist.Store] = Future()
        Thread(target=_open_store, args=(opening, address, placement.port, left), daemon=True).start()
        try:
            return address, opening.result(left)
        except FutureTimeout:
            problem = FutureTimeout("it accepts connections and says nothing")
        except RuntimeError as error:
            problem = error
    raise ConnectionError(
        f"rank {placement.rank} has not reached rank 0 at MASTER_ADDR={' or '.join(addresses)} "
        f"MASTER_PORT={placement.port} "
        f"in {timeout_seconds:g} s (parallel.start_timeout_seconds): is rank 0 running there? Last answer: "
        f"{str(problem).splitlines()[0] if problem else 'none'}"
    )


def _open_store(opening: "Future[dist.Store]", address: str, port: int, timeout_seconds: float) -> None:
    timeout = timedelta(seconds=timeout_seconds)
    try:
        opening.set_result(dist.TCPStore(address, port, None, False, timeout, wait_for_workers=False))
    except RuntimeError as error:
        opening.set_exception(error)


def prepare_after_first(
    store: dist.Store, placement: Placement, prepare: Callable[[], None], timeout_seconds: float
) -> None:
    """`prepare`, once the first rank of the node has ended its own: what that compiled is on the node's disk,
    and what it measured is what all choose by. Raises a ConnectionError that names the first rank."""
    key = f"prepared/{placement.node}"
    if placement.local_rank > 0:
        with _rank_zero_named(placement):
            prepared = _is_set(store, key, time.monotonic() + timeout_seconds)
        if not prepared:
            raise ConnectionError(
                f"rank {placement.rank}: rank {placement.rank - placement.local_rank}, the first of its "
                f"node, is not ready after {timeout_seconds:g} s (parallel.compile_timeout_seconds): it "
                "compiles kernels, or has ended; see its log"
            )
    prepare()
    if placement.local_rank == 0:
        store.set(key, "")


def _is_set(store: dist.Store, key: str, deadline: float) -> bool:
    """False after the deadline."""
    pause = _POLL_SECONDS
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_POLL_SECONDS)
    return True


@contextmanager
def _rank_zero_named(placement: Placement) -> Iterator[None]:
    """The store has ended with rank 0."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(
            f"rank {placement.rank}: rank 0 has ended before all ranks were ready "
            f"({str(error).splitlines()[0]}); see its log"
        ) from error


def wait_until_ready(store: dist.Store, placement: Placement, timeout_seconds: float) -> None:
    """Returns once every rank has called this, or raises a ConnectionError that names those that have not.

    Before there is a process group: whoever is late keeps nobody waiting in a collective, whose time-out is
    of another kind.
    """
    deadline = time.monotonic() + timeout_seconds
    with _rank_zero_named(placement):
        if not _all_signed(store, placement, "ready", deadline):
            missing = _missing(store, placement, "ready")
            raise ConnectionError(
                f"rank {placement.rank} of {placement.size}: rank {missing} is not ready after "
                f"{timeout_seconds:g} s (parallel.compile_timeout_seconds): it compiles kernels, or has "
                "ended; see its log"
            )


def _all_signed(store: dist.Store, placement: Placement, sheet: str, deadline: float) -> bool:
    """Sign, and wait for the others; False after the deadline, or once another rank has given up."""
    store.set(f"{sheet}/{placement.rank}", f"{socket.gethostname()} pid {os.getpid()}")
    store.add(f"{sheet}/count", 1)
    pause = _POLL_SECONDS
    while store.add(f"{sheet}/count", 0) < placement.size:
        if time.monotonic() > deadline or store.check([f"{sheet}/missing"]):
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_POLL_SECONDS)  # of a thousand ranks that wait for minutes
    return True


def _missing(store: dist.Store, placement: Placement, sheet: str) -> str:
    """The ranks that have not signed; the others are told to give up too."""
    missing = [str(rank) for rank in range(placement.size) if not store.check([f"{sheet}/{rank}"])]
    store.set(f"{sheet}/missing", ",".join(missing))
    if placement.rank == 0:
        time.sleep(2 * _LONGEST_POLL_SECONDS)  # the store ends with rank 0: let the others read
    return ", ".join(missing)


def _wait_for_peers(
    store: dist.Store, placement: Placement, address: str, deadline: float, timeout_seconds: float
) -> None:
    """Everybody signs in; whoever gives up first tells the others whom it missed."""
    try:
        if not _all_signed(store, placement, "here", deadline):
            missing = _missing(store, placement, "here")
            raise ConnectionError(
                f"rank {placement.rank} of {placement.size}: rank {missing} did not appear in "
                f"{timeout_seconds:g} s (parallel.start_timeout_seconds); see its log, or check that "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT are the same for all"
            )
    except RuntimeError as error:
        raise ConnectionError(
            f"rank {placement.rank}: whoever listens at MASTER_ADDR={address} MASTER_PORT={placement.port} "
            f"does not answer as rank 0 of this run, or has ended ({str(error).splitlines()[0]}); see rank "
            "0's log, or choose another MASTER_PORT"
        ) from error
