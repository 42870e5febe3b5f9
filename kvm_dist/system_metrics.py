"""How busy each node is: `system_metrics/NODE.jsonl` in the run directory, written by one process a node.

    python -m kvm_dist.system_metrics RUN_DIR --parent PID --seconds S

It steps back behind training, lives as long as the process it was started by, and whatever it cannot read is
left out. Names are MLflow's, `system/NODE/cpu_utilization_percentage`. Imports no torch and no mlflow.
"""

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from kvm_dist.metrics import append_metrics, parse_metrics
from kvm_dist.system_metrics_gpu import gpu_reader

SYSTEM_FOLDER = "system_metrics"
LARGEST_BYTES = 32 << 20  # weeks of one node; beyond that the older half goes
SHORTEST_SECONDS = 1.0
_TICK_SECONDS = 0.5
_LOWEST_PRIORITY = 19
_LAST_LINES_BYTES = 64 << 10
Reader = Callable[[], Mapping[str, float]]


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Slurm's name of this machine, or its own; fit for a metric and for a file."""
    name = environment.get("SLURMD_NODENAME") or socket.gethostname()
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name.partition(".")[0]).strip("-") or "node"


def processor_and_memory() -> dict[str, float]:
    """Since the last call; the first one's utilization means nothing."""
    memory = psutil.virtual_memory()
    return {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / 1e6,
        "system_memory_usage_percentage": memory.used / memory.total * 100,
    }


def disk_reader(folder: Path) -> Reader:
    """The disk that holds `folder`."""

    def read() -> dict[str, float]:
        space = psutil.disk_usage(str(folder))
        return {
            "disk_usage_percentage": space.percent,
            "disk_usage_megabytes": space.used / 1e6,
            "disk_available_megabytes": space.free / 1e6,
        }

    return read


def network_reader() -> Reader:
    """Traffic since now."""
    begun = psutil.net_io_counters()

    def read() -> dict[str, float]:
        now = psutil.net_io_counters()
        return {
            "network_receive_megabytes": (now.bytes_recv - begun.bytes_recv) / 1e6,
            "network_transmit_megabytes": (now.bytes_sent - begun.bytes_sent) / 1e6,
        }

    return read


def all_readers(run_dir: Path) -> list[Reader]:
    processor_and_memory()
    gpus = gpu_reader()
    return [processor_and_memory, disk_reader(run_dir), network_reader(), *([gpus] if gpus else [])]


class NodeMetrics:
    """Appends what the readers say, numbered on from what the file has."""

    def __init__(self, run_dir: Path, node: str, readers: list[Reader]) -> None:
        self.path = run_dir / SYSTEM_FOLDER / f"{node}.jsonl"
        self._node = node
        self._readers = readers
        self._step = last_step(self.path)

    def sample(self) -> None:
        """One line. A reader that fails is left out this time."""
        values: dict[str, float] = {}
        for read in self._readers:
            with contextlib.suppress(
                Exception
            ):  # drivers raise their own kinds; none of them is worth a stop
                values |= read()
        self._step += 1
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o750, exist_ok=True)
            append_metrics(
                self.path,
                self._step,
                {f"system/{self._node}/{name}": round(value, 3) for name, value in values.items()},
            )
            self._forget_older_half_if_large()

    def _forget_older_half_if_large(self) -> None:
        if self.path.stat().st_size <= LARGEST_BYTES:
            return
        content = self.path.read_bytes()
        kept = content[content.index(b"\n", len(content) // 2) + 1 :]
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_bytes(kept)
        os.replace(partial, self.path)


def last_step(path: Path) -> int:
    """The number of the last line; 0 for a new file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LAST_LINES_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0
    steps = [int(values["step"]) for line in lines if (values := parse_metrics(line)) is not None]
    return max(steps, default=0)


@contextlib.contextmanager
def sampled(run_dir: Path, seconds: float) -> Iterator[None]:
    """A sampling process for the duration, every `seconds`; 0: none. What goes wrong with it stops nobody."""
    process = _start(run_dir, seconds) if seconds > 0 else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def _start(run_dir: Path, seconds: float) -> "subprocess.Popen[bytes] | None":
    command = [sys.executable, "-m", "kvm_dist.system_metrics", str(run_dir.absolute())]
    command += ["--parent", str(os.getpid()), "--seconds", str(seconds)]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("kvm_dist.system_metrics", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--parent", type=int, required=True, help="process id of the rank it belongs to")
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # sent to whole jobs; this one ends with its rank
    os.nice(_LOWEST_PRIORITY)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_LOWEST_PRIORITY))
    node = NodeMetrics(options.run_dir, node_name(), all_readers(options.run_dir))
    interval = max(options.seconds, SHORTEST_SECONDS)
    following = time.monotonic() + interval
    while os.getppid() == options.parent:
        if time.monotonic() >= following:
            node.sample()
            following = time.monotonic() + interval
        time.sleep(_TICK_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
