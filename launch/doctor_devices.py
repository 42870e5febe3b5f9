"""The devices of this machine, and where kernels compiled for them are kept."""

import os
import re
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvm_dist.config import RunConfig
from launch.finding import Finding

DRIVERS = (Path("/sys/module/amdgpu/version"), Path("/proc/driver/nvidia/version"))
MOUNTS = Path("/proc/self/mounts")
NETWORK = frozenset(
    ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "wekafs", "panfs", "fuse.sshfs", "9p")
)


def check_devices(config: RunConfig) -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("device", "fail", f"torch cannot be imported: {error}", "pip install -e .")
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        names = sorted({_gpu_name(torch.cuda, index) for index in range(count)})
        backend = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        yield Finding("device", "ok", f"{count} x {', '.join(names)} ({backend}, driver {_gpu_driver()})")
        yield from _check_kernel_cache()
        yield from _check_c_compiler()
    elif config.device == "cuda":
        fix = "install a GPU build of torch, or set device=cpu"
        yield Finding("device", "fail", "device=cuda, but torch sees no GPU", fix)
    else:
        yield Finding("device", "ok", "no GPU: the CPU")


def _gpu_name(cuda: Any, index: int) -> str:
    """With its architecture, which the kernels are compiled for: gfx942, sm_90."""
    major, minor = cuda.get_device_capability(index)
    of_amd = getattr(cuda.get_device_properties(index), "gcnArchName", "")
    architecture = of_amd.partition(":")[0] or f"sm_{major}{minor}"
    return f"{cuda.get_device_name(index)} ({architecture})"


def _gpu_driver() -> str:
    for path in DRIVERS:
        try:
            first = path.read_text().splitlines()[0]
        except (OSError, IndexError):
            continue
        return next((word for word in first.split() if word[:1].isdigit()), first)
    return "unknown"


def _check_kernel_cache() -> Iterator[Finding]:
    """A cold or shared cache makes the first step look like a hang, and its locks fail over a network."""
    cache = kernel_cache(os.environ)
    kind = file_system(cache)
    if kind in NETWORK:
        fix = "set TRITON_CACHE_DIR to a folder on the node's own disk; jobs of `submit` do so by themselves"
        yield Finding("kernel cache", "warn", f"{cache} is on a network file system ({kind})", fix)
    else:
        yield Finding("kernel cache", "ok", f"{cache} ({kind})")


def _check_c_compiler() -> Iterator[Finding]:
    """Most versions of Triton build a small library in C on every node, before their first kernel."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton asks
    header = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    if compiler and header.is_file():
        yield Finding("C compiler", "ok", f"{compiler}, {header}")
        return
    missing = "no gcc, no clang, CC is not set" if not compiler else f"no {header}"
    fix = "install gcc and python3-dev (or module load them) on every node, unless your Triton needs neither"
    yield Finding("C compiler", "warn", f"Triton may need one to start: {missing}", fix)


def kernel_cache(environment: Mapping[str, str]) -> Path:
    """Where Triton keeps what it compiled."""
    if folder := environment.get("TRITON_CACHE_DIR"):
        return Path(folder)
    return Path(environment.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def file_system(path: Path, mounts: Path = MOUNTS) -> str:
    """Linux's word for the file system that `path` lies on or would lie on; "unknown" elsewhere."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return "unknown"
    found = Path(), "unknown"
    for _, mount_point, kind, *_ in (line.split() for line in lines):
        place = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), mount_point))
        if path.resolve().is_relative_to(place) and len(place.parts) >= len(found[0].parts):
            found = place, kind
    return found[1]
