"""One live run per run directory: a lock file that names its holder. Imports no torch."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from kvm_dist.exit_codes import ConfigError
from kvm_dist.slurm_queue import job_is_alive

UNWRITTEN_SECONDS = 10.0  # an empty lock file older than this belongs to a launch that died making it


@dataclass(frozen=True)
class Holder:
    """Who holds a lock. process_start: clock ticks after boot, so that a reused pid is not the holder.

    job, restart: of Slurm, if the holder is part of a job: the job and how often it was queued again before.
    """

    host: str
    pid: int
    process_start: int
    since: str
    job: str = ""
    restart: int = 0


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold `path` for the duration. Raises ConfigError naming a live holder; takes over from a dead one."""
    me = this_process()
    _acquire(path, me)
    try:
        yield
    finally:
        with suppress(OSError):
            if read_holder(path) == me:
                path.unlink()


def this_process() -> Holder:
    return Holder(
        socket.gethostname(),
        os.getpid(),
        process_start(os.getpid()) or 0,
        time.strftime("%Y-%m-%d %H:%M:%S"),
        os.environ.get("SLURM_JOB_ID", ""),
        int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    )


def _acquire(path: Path, me: Holder) -> None:
    for _ in range(20):
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640)
        except FileExistsError:
            if _take_over(path, me):
                return
            continue  # the holder left in between
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(asdict(me)))
        return
    raise ConfigError(f"{path}: taken and left by other launches again and again; try once more")


def _take_over(path: Path, me: Holder) -> bool:
    """Write ourselves into a dead holder's file. False if the file is gone; ConfigError if its holder lives.

    The file is changed in place under flock: of several launches that find it stale, one wins, and the others
    then read its name.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    with os.fdopen(descriptor, "r+") as file:
        with suppress(OSError):  # a file system without flock: stale files are rare, races for them rarer
            fcntl.flock(file, fcntl.LOCK_EX)
        if not path.exists() or os.fstat(file.fileno()).st_ino != path.stat().st_ino:
            return False
        holder = _parse(file.read())
        _refuse_if_live(path, holder, me)
        file.seek(0)
        file.truncate()
        file.write(json.dumps(asdict(me)))
    return True


def _refuse_if_live(path: Path, holder: Holder | None, me: Holder) -> None:
    if holder is None:
        if time.time() - path.stat().st_mtime > UNWRITTEN_SECONDS:
            return
        raise ConfigError(
            f"{path}: another launch of this run directory is just starting; wait for it or stop it"
        )
    if _is_earlier_start_of_our_job(holder, me):
        return
    live = is_live(holder)
    if live is False:
        return
    job = f", Slurm job {holder.job}," if holder.job else ""
    if holder.host == socket.gethostname():
        stop = f"scancel {holder.job}" if holder.job else f"kill {holder.pid}"
        raise ConfigError(
            f"{path}: the run is held by pid {holder.pid} on this host ({holder.host}){job} since "
            f"{holder.since}; wait for it, or stop it with: {stop}"
        )
    known = "its job is in the queue" if live else "whether it still runs cannot be asked from here"
    raise ConfigError(
        f"{path}: the run is held by pid {holder.pid} on host {holder.host}{job} since {holder.since} "
        f"({known}); "
        f"stop it there, or, if that machine is gone, delete {path}"
    )


def _is_earlier_start_of_our_job(holder: Holder, me: Holder) -> bool:
    """Slurm starts a job again only when nothing of its last start is left."""
    return bool(me.job) and holder.job == me.job and holder.restart < me.restart


def process_start(pid: int) -> int | None:
    """Clock ticks between boot and the start of process `pid`; None if there is none, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _exists_without_proc(pid)
    return None if fields[0] in "ZX" else int(fields[19])


def _exists_without_proc(pid: int) -> int | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0


def read_holder(path: Path) -> Holder | None:
    """Who wrote the lock at `path`, alive or not; None if nobody has or it cannot be read."""
    try:
        return _parse(path.read_text())
    except OSError:
        return None


def is_live(holder: Holder) -> bool | None:
    """Whether the holder still runs; None for one on another host of which Slurm does not tell either."""
    if holder.host == socket.gethostname() and process_start(holder.pid) == holder.process_start:
        return True
    if holder.job:  # a process that is not seen here may be that of another node or container
        return job_is_alive(holder.job)
    return False if holder.host == socket.gethostname() else None


def _parse(text: str) -> Holder | None:
    try:
        return Holder(**json.loads(text))
    except (ValueError, TypeError):
        return None
