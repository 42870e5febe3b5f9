"""The doctor as several ranks, `srun kvm-dist doctor CONFIG`: compares nodes, measures what joins them."""

import hashlib
import importlib.metadata
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvm_dist.config import RunConfig
from launch.doctor_engine import engine_verdict
from parallel.placement import Placement

Facts = Mapping[str, str]
HOST = "host"
SMALL_BYTES, LARGE_BYTES = 4, 64 << 20
ROUNDS = 5
_VARIABLES = ("NCCL_", "RCCL_", "HSA_", "HIP_FORCE", "GPU_MAX", "OMP_NUM", "TRITON_", "TORCH_NCCL", "AMDGCN_")
_PER_NODE = ("TRITON_CACHE_DIR",)


def compare_ranks(
    config: RunConfig, placement: Placement, packages: Sequence[str]
) -> list[tuple[str, str, str]]:
    """(what, found, fix) of every comparison, on every rank alike; fix is empty where all agree. Collective.

    Raises ConnectionError naming the rank that cannot be reached.
    """
    from parallel import collectives
    from parallel.world import join_world, leave_world

    parallel = config.parallel.model_copy(update={"data": placement.size, "sequence": 1, "head_parallel": 1})
    world = join_world(parallel, config.device)
    try:
        gathered = collectives.gather_objects(facts(str(world.device), packages))
        links = _links(world.size, str(world.device))
        return [*differences(gathered), *links, ("engine", *engine_verdict(config, world))]
    finally:
        leave_world()


def facts(device: str, packages: Sequence[str]) -> Facts:
    """What must be the same on every rank, and the name of its host."""
    found = {HOST: socket.gethostname(), "python": platform.python_version(), "code": code_digest()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["device"] = _device_name(device)
    for name in sorted(os.environ):
        if name.startswith(_VARIABLES) and name not in _PER_NODE:
            found[name] = os.environ[name]
    return found


def differences(gathered: Sequence[Facts]) -> Iterator[tuple[str, str, str]]:
    """One line for what all ranks share, and one for everything they do not."""
    names = dict.fromkeys(name for one in gathered for name in one if name != HOST)
    hosts = list(dict.fromkeys(one[HOST] for one in gathered))
    differing = [name for name in names if len({one.get(name, "not set") for one in gathered}) > 1]
    shared = len(names) - len(differing)
    yield "ranks", f"{len(gathered)} on {', '.join(hosts)}; the same on all: {shared} of {len(names)}", ""
    for name in differing:
        values: dict[str, list[int]] = {}
        for rank, one in enumerate(gathered):
            values.setdefault(one.get(name, "not set"), []).append(rank)
        found = "; ".join(
            f"{value} on rank {', '.join(map(str, ranks))} ({gathered[ranks[0]][HOST]})"
            for value, ranks in values.items()
        )
        yield name, found, "make it the same on every node: ranks that differ may hang or compute other bits"


def code_digest() -> str:
    """Of all files that a run is made of: sources, and rows of tiles that were measured."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for package in ("launch", "kvm_dist", "models", "parallel"):
        for path in sorted(path for kind in ("*.py", "*.json") for path in (root / package).rglob(kind)):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"


def _links(ranks: int, device: str) -> Iterator[tuple[str, str, str]]:
    """All-reduce of a number and of 64 MiB: the slowest rank's best of some rounds."""
    small, large = (_all_reduce_seconds(count, device) for count in (SMALL_BYTES, LARGE_BYTES))
    moved = 2 * (ranks - 1) / ranks * LARGE_BYTES  # that a ring sends over every link
    yield (
        "links",
        f"all-reduce: {1e6 * small:,.0f} us for a number, {moved / large / 1e9:.2f} GB/s a link",
        "",
    )


def _all_reduce_seconds(count: int, device: str) -> float:
    import torch

    from parallel import collectives

    tensor = torch.zeros(count // 4, device=device)
    best = float("inf")
    for _ in range(ROUNDS):
        collectives.barrier()
        begun = time.perf_counter()
        float(collectives.sum(tensor)[0])  # waits for a GPU, too
        best = min(best, time.perf_counter() - begun)
    return float(collectives.maximum(torch.tensor(best, device=device)))
