"""A tiny run submitted to the loopback Slurm, and what befalls it there."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvm_dist.attempts import read_attempts
from kvm_dist.heartbeat import read_beats
from tests.launch.tiny_run import TinyRun
from tests.support import slurm_cluster

REBOOT_SECONDS = 3.0
CREDENTIAL_SECONDS = 2.0  # started in the second it was ended in, a job is refused by its nodes, and gone
PATIENCE_SECONDS = 450.0  # of a machine with other work; each wait ends as soon as it can


class SlurmRun(TinyRun):
    """A run of two ranks on two nodes."""

    job = ""

    def submit(self, *overrides: str) -> None:
        self._follow(self.command("submit", str(self.config), "slurm.nodes=2", *overrides))

    def resume(self) -> None:
        """As another job."""
        self._follow(self.command("resume", str(self.directory)))

    def command(self, *words: str) -> str:
        """`kvm-dist` with this cluster; what it says."""
        ended = subprocess.run(
            [sys.executable, "-m", "launch.cli", *words],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def environment(self) -> dict[str, str]:
        return slurm_cluster.environment() | {"OMP_NUM_THREADS": "1"}

    def _follow(self, said: str) -> None:
        self.job = said.rpartition("job ")[2].split()[0]

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"no {what}:\n{self.output()}"
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        """Until the start under way has `step` steps behind it. Fails if the run is over before."""
        self.wait(f"step {step}", lambda: self.reached() >= step)

    def reached(self) -> int:
        """Steps behind the start under way; 0 before it trains."""
        attempts = read_attempts(self.directory)
        if not attempts or attempts[-1].code is not None:
            return 0
        beats = read_beats(self.directory / "heartbeats", attempts[-1].number)
        return min((beat.step for beat in beats), default=1) - 1

    def start_again_now(self) -> None:
        """Wait until the job is back in the queue, and start it soon: Slurm alone takes two minutes."""
        self.wait("requeue", lambda: slurm("squeue", "-h", "-j", self.job, "-o", "%T") == "PENDING")
        self._start_soon()

    def _start_soon(self) -> None:
        time.sleep(CREDENTIAL_SECONDS)
        slurm("scontrol", "update", f"jobid={self.job}", "StartTime=now")

    def lose_node(self, node: str) -> None:
        """Its power is cut; it is back once the job waits and some seconds have passed, as after a reboot.

        Slurm 22.05 now and then creates no steps on a node that came back by itself, until a person says that
        it is in service.
        """
        restarts = self.restarts()
        slurm_cluster.kill_node(node)
        self.wait("requeue", lambda: self.restarts() > restarts and self.state() == "PENDING")
        time.sleep(REBOOT_SECONDS)
        slurm_cluster.start_node(node)
        self.wait_for_node(node)
        slurm_cluster.return_to_service(node)
        self.wait_for_node(node)

    def restarts(self) -> int:
        found = re.search(r"Restarts=(\d+)", slurm("scontrol", "show", "job", self.job))
        return int(found[1]) if found else -1

    def wait_for_node(self, node: str) -> None:
        """Until jobs may run there again."""
        self.wait(
            f"{node} idle", lambda: slurm("sinfo", "-h", "-p", "main", "-n", node, "-o", "%t") == "idle"
        )

    def wait_for_end(self, start_again: bool = False) -> None:
        """Until the job has left the queue; `start_again`: soon whenever it is back there."""

        def ended() -> bool:
            state = slurm("squeue", "-h", "-j", self.job, "-o", "%T")
            if start_again and state == "PENDING":
                self._start_soon()
            return state == ""

        self.wait("end", ended)

    def state(self) -> str:
        return slurm("squeue", "-h", "-t", "all", "-j", self.job, "-o", "%T")

    def cancel(self) -> None:
        if self.job:
            slurm("scancel", self.job)

    def output(self) -> str:
        return "\n".join(path.read_text() for path in (self.directory / "slurm").glob("output*"))


def slurm(*command: str) -> str:
    """A Slurm command on the loopback cluster; what it says."""
    return slurm_cluster.output(*command).strip()


def rank_pids(rank: int, folder: Path) -> Sequence[int]:
    """The processes of a Slurm task that train in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit():
                continue
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ours = any(word.startswith(str(folder).encode()) for word in words) and b"launch.slurm_rank" in words
        if ours and f"SLURM_PROCID={rank}".encode() in environment and b"srun" not in words[0]:
            found.append(int(entry.name))
    return found
