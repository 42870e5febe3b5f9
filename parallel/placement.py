"""Where the launcher put this process, read from its environment. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Placement:
    """One process among `size`.

    addresses: where rank 0 may be met, best first; port: 0 when a single process needs none.
    cores: CPU cores the launcher gave this process, None when it did not say.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    addresses: tuple[str, ...] = (LOOPBACK,)
    port: int = 0
    cores: int | None = None
    launcher: str = "none"


def world_from_environment(env: Mapping[str, str]) -> Placement:
    """The placement that torchrun, else submitit's local executor, else Slurm describes; else one process.

    Raises ValueError naming the variable when a launcher's variables are incomplete or contradict each other.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        placement = _torchrun(env)
    elif "SUBMITIT_LOCAL_GLOBALRANK" in env:
        placement = _submitit_local(env)
    elif "SLURM_PROCID" in env and _is_slurm_task(env):
        placement = _slurm(env)
    else:
        return Placement()
    _check(placement)
    return placement


def threads_from_environment(env: Mapping[str, str]) -> int | None:
    """CPU threads that whoever started the rank chose by OMP_NUM_THREADS; None where it is not set.

    Of several numbers, for loops within loops, the first counts. Raises ValueError for anything else.
    """
    text = env.get("OMP_NUM_THREADS", "")
    if not text.strip():
        return None
    first = text.partition(",")[0].strip()
    if not first.isdecimal() or int(first) == 0:
        raise ValueError(
            f"OMP_NUM_THREADS={text!r} is no number of threads; set it to 1 or more, or unset it: ranks then "
            "share the cores of their machine"
        )
    return int(first)


def devices_counted_once(env: Mapping[str, str]) -> tuple[str, ...]:
    """Variables to drop so that a choice of GPUs counts once.

    ROCR_VISIBLE_DEVICES hides GPUs from HIP, and HIP_VISIBLE_DEVICES (or CUDA_VISIBLE_DEVICES, which HIP
    reads too) then counts among those left: Slurm may set all of them to the same numbers, and "2,3" of two
    GPUs is none.
    """
    outer = env.get("ROCR_VISIBLE_DEVICES")
    if outer is None:
        return ()
    inner = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
    return tuple(name for name in inner if env.get(name) == outer)


def _torchrun(env: Mapping[str, str]) -> Placement:
    size = _integer(env, "WORLD_SIZE")
    rank = _integer(env, "RANK")
    local_size = _integer(env, "LOCAL_WORLD_SIZE", size)
    return Placement(
        rank=rank,
        size=size,
        local_rank=_integer(env, "LOCAL_RANK", rank % max(local_size, 1)),
        local_size=local_size,
        node=_integer(env, "GROUP_RANK", rank // max(local_size, 1)),
        addresses=(env.get("MASTER_ADDR", LOOPBACK),),
        port=_integer(env, "MASTER_PORT", 0 if size == 1 else None),
        launcher="torchrun",
    )


def _submitit_local(env: Mapping[str, str]) -> Placement:
    size = _integer(env, "SUBMITIT_LOCAL_NTASKS")
    return Placement(
        rank=_integer(env, "SUBMITIT_LOCAL_GLOBALRANK"),
        size=size,
        local_rank=_integer(env, "SUBMITIT_LOCAL_LOCALID"),
        local_size=size // max(_integer(env, "SUBMITIT_LOCAL_NNODES", 1), 1),
        node=_integer(env, "SUBMITIT_LOCAL_NODEID", 0),
        addresses=(env.get("MASTER_ADDR", LOOPBACK),),
        port=_integer(env, "MASTER_PORT", _port_of_job(env.get("SUBMITIT_LOCAL_JOB_ID", "0"))),
        launcher="submitit",
    )


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    """False in the shell of a batch script, which has a SLURM_PROCID but is no task of a step."""
    return "SLURM_STEP_ID" in env or "SLURM_JOB_ID" not in env


def _slurm(env: Mapping[str, str]) -> Placement:
    size = _integer(env, "SLURM_STEP_NUM_TASKS", _integer(env, "SLURM_NTASKS", 1))
    nodes = _integer(env, "SLURM_STEP_NUM_NODES", _integer(env, "SLURM_NNODES", 1))
    node = _integer(env, "SLURM_NODEID", 0)
    job, step = env.get("SLURM_JOB_ID", "0"), env.get("SLURM_STEP_ID", "0")
    return Placement(
        rank=_integer(env, "SLURM_PROCID"),
        size=size,
        local_rank=_integer(env, "SLURM_LOCALID", 0),
        local_size=_slurm_local_size(env, size, nodes, node),
        node=node,
        addresses=_slurm_addresses(env, nodes),
        port=_integer(env, "MASTER_PORT", _port_of_job(f"{job}{step}")),
        cores=_integer(env, "SLURM_CPUS_PER_TASK", 0) or None,
        launcher="slurm",
    )


def _slurm_local_size(env: Mapping[str, str], size: int, nodes: int, node: int) -> int:
    """SLURM_STEP_TASKS_PER_NODE reads "2(x3),1": three nodes of two tasks, one of one."""
    counts: list[int] = []
    text = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", ""))
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else size // max(nodes, 1)


def _slurm_addresses(env: Mapping[str, str], nodes: int) -> tuple[str, ...]:
    """The node that launched the step comes last: on an allocation made elsewhere it is a login node."""
    if "MASTER_ADDR" in env:
        given = [env["MASTER_ADDR"]]
    elif nodes == 1:
        return (LOOPBACK,)
    else:
        given = [first_host(env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "")))]
    return tuple(host for host in [*given, env.get("SLURM_LAUNCH_NODE_IPADDR", "")] if host)


def first_host(node_list: str) -> str:
    """The first name of a Slurm host list: "gpu[007-010,12],login" -> "gpu007"."""
    first_of_each = re.sub(r"\[([^\]\-,]+)[^\]]*\]", r"\1", node_list)
    return first_of_each.split(",")[0]


def _port_of_job(job: str) -> int:
    """The same on every task, seldom that of another job, below the range of outgoing connections."""
    digits = re.sub(r"\D", "", job) or "0"
    return 20_000 + int(digits) % 12_000


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name)
    if value is None or value == "":
        if default is None:
            raise ValueError(
                f"{name} is not set although the other launcher variables are; set it or unset them all"
            )
        return default
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} is not an integer") from None


def _check(placement: Placement) -> None:
    for name, value, limit in (
        ("rank", placement.rank, placement.size),
        ("local rank", placement.local_rank, placement.local_size),
    ):
        if not 0 <= value < limit:
            raise ValueError(
                f"the variables of {placement.launcher} give {name} {value} of {limit}; "
                f"wanted 0 <= {name} < {limit}"
            )
