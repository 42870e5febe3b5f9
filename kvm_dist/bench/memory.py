"""Peak memory of one forward and backward, measured in a process of its own: peaks cannot be forgotten."""

import json
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from kvm_dist.bench.setting import Setting
from kvm_dist.exit_codes import CrashError

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(setting: Setting, contender: str) -> int:
    """Bytes above inputs, outputs and their gradients, at `setting.memory_length` tokens."""
    task = json.dumps({"setting": asdict(setting), "contender": contender})
    ended = subprocess.run(
        [sys.executable, "-m", "kvm_dist.bench.memory", task], capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise CrashError(f"measuring the memory of {contender} failed:\n{ended.stderr.strip()}")
    return int(ended.stdout)


def measure(setting: Setting, contender: str) -> int:
    """`peak_bytes`, in this process."""
    import torch

    from kvm_dist.bench.contenders import forward, grad_output, make_inputs, warm_up

    torch.set_num_threads(setting.threads)
    warm_up(setting)
    inputs = make_inputs(setting, setting.memory_length)
    grad = grad_output(setting, setting.memory_length)
    before = resident_bytes()
    forget_peak()
    output = forward(setting, contender, inputs)
    output.backward(grad)
    gradients = [tensor.grad for tensor in inputs.values() if tensor.grad is not None]
    return peak_resident_bytes() - before - sum(tensor.nbytes for tensor in (output, *gradients))


def forget_peak() -> None:
    """Linux starts the peak anew; elsewhere the peak of starting up, far below, stays in it."""
    if _CLEAR.exists():
        _CLEAR.write_text("5")


def resident_bytes() -> int:
    return _field("VmRSS") if _STATUS.exists() else _largest()


def peak_resident_bytes() -> int:
    return _field("VmHWM") if _STATUS.exists() else _largest()


def _field(name: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _largest() -> int:
    """Bytes, which macOS counts and Linux counts in KiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    lengths = tuple(given["setting"].pop("lengths"))
    print(measure(Setting(lengths=lengths, **given["setting"]), given["contender"]))
