"""All ranks of a job as one srun: how it is started, and what is known when it has ended. No torch."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from kvm_dist.config import RunConfig
from kvm_dist.exit_codes import ExitCode
from kvm_dist.slurm_config import ContainerConfig
from launch.local import SPEAKING_CODES

# "srun: error: node2: task 1: Killed", "srun: error: node[1-2]: tasks 0-1: Exited with exit code 70"
_TASK_ENDED = re.compile(rb"srun: error: (\S+): tasks? (\d+)[-,\d]*: (.+)")
_NOT_STARTED = re.compile(rb"srun: error: (Unable to create step .+)")
_EXIT_CODE = re.compile(r"xited with exit code (\d+)$")
# of a rank that was asked to stop before it could save, or had nothing to
_TOLD_TO_END = ("Terminated", "User defined signal 2", f"xit code {int(ExitCode.PREEMPTED)}")

# An earlier step whose processes do not die keeps its nodes: srun would ask for them again for ever.
STEP_WAIT_SECONDS = 600


def step_command(config: RunConfig, tasks_per_node: int, path: Path, ends: Path) -> list[str]:
    """srun with one task a rank. path: the resolved configuration; ends: where ranks write how they ended."""
    slurm = config.slurm
    command = ["srun", "--kill-on-bad-exit=1", "--unbuffered", "--input=none", f"--nodes={slurm.nodes}"]
    # Whatever a cluster's defaults are: neighbours share nodes, and the last rank may take its time to end.
    command += ["--distribution=block", "--wait=0", f"--immediate={STEP_WAIT_SECONDS}"]
    command += [f"--ntasks={config.parallel.world_size}", f"--ntasks-per-node={tasks_per_node}"]
    if slurm.cpus_per_task is not None:
        command.append(f"--cpus-per-task={slurm.cpus_per_task}")  # since Slurm 22.05 srun must be told again
    rank = ["-P", "-u", "-m", "launch.slurm_rank", str(path), str(ends)]
    if slurm.container is None:
        return [*command, *slurm.srun_args, sys.executable, *rank]
    inside = [*_code_path(), slurm.container.python, *rank]
    if slurm.container.runtime == "pyxis":
        return [*command, *_pyxis(slurm.container), *slurm.srun_args, *inside]
    return [*command, *slurm.srun_args, *_apptainer(slurm.container), *inside]


def _code_path() -> list[str]:
    """Inside, for an image that sets a path of its own: the ranks run the code that was submitted."""
    return ["env", f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []


def _pyxis(container: ContainerConfig) -> list[str]:
    mounts = [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
    image = f"--container-image={container.image}"
    return [image, *mounts, f"--container-workdir={os.getcwd()}", *container.options]


def _apptainer(container: ContainerConfig) -> list[str]:
    mounts = [part for mount in container.mounts for part in ("--bind", mount)]
    return ["apptainer", "exec", *mounts, "--pwd", os.getcwd(), *container.options, container.image]


def write_end(ends: Path, rank: int, code: int) -> None:
    """How a rank ended, written by itself: srun tells only of the worst one."""
    partial = ends / f".{rank}"
    partial.write_text(str(code))
    partial.replace(ends / str(rank))


class Step:
    """A running srun. Its output is ours; what it says of ended tasks is kept."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], ends: Path, ranks: int
    ) -> None:
        self._ends, self._ranks = ends, ranks
        self._deaths: list[tuple[int, str]] = []  # rank and how, in the order that srun noticed
        self._not_started = "see the job's output"
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        assert self._process.stderr is not None, "the stream was asked for"
        self._reader = threading.Thread(target=self._read, args=(self._process.stderr,), daemon=True)
        self._reader.start()

    def running(self) -> bool:
        return self._process.poll() is None

    def exit_code(self) -> int:
        """The exit code that speaks for all ranks, once they have ended."""
        code = self._process.wait()
        self._reader.join(timeout=5)
        if [end for _, end in self._written_ends()] == [ExitCode.DONE] * self._ranks:
            return int(ExitCode.DONE)
        codes = [end for _, end in self._known_ends()]
        failures = [end for end in codes if end not in (ExitCode.DONE, ExitCode.PREEMPTED)]
        first = self._deaths[0][1] if self._deaths else ""
        told = any(word in first for word in _TOLD_TO_END)
        # srun asks the others to stop when one has failed: that they did, and say so, is no preemption
        if failures or (first and not told):
            return next((end for end in failures if end in SPEAKING_CODES), int(ExitCode.CRASH))
        if told or ExitCode.PREEMPTED in codes:
            return int(ExitCode.PREEMPTED)
        return int(ExitCode.DONE if code == 0 else ExitCode.CRASH)

    def first_failure(self, code: int) -> tuple[int, str]:
        """The rank that ended the step with `code`, and how, in words: a killed one before its mourners."""
        if code == ExitCode.CRASH and self._deaths and "xited with" not in self._deaths[0][1]:
            return self._deaths[0]
        for rank, end in self._known_ends():
            if end == code:
                return rank, f"ended with exit code {end}"
        if self._deaths:
            return self._deaths[0]
        return 0, f"did not start; {self._not_started}"

    def _known_ends(self) -> list[tuple[int, int]]:
        """Written ones, and those of which only srun tells: a watchdog ends its rank without a word."""
        ends = dict(self._written_ends())
        for rank, how in self._deaths:
            if match := _EXIT_CODE.search(how):
                ends.setdefault(rank, int(match[1]))
        return list(ends.items())

    def _written_ends(self) -> list[tuple[int, int]]:
        """Rank and code of every rank that wrote one, in the order they ended."""
        paths = [path for path in self._ends.iterdir() if path.name.isdigit()]
        paths.sort(key=lambda path: (path.stat().st_mtime_ns, int(path.name)))
        return [(int(path.name), int(path.read_text())) for path in paths]

    def _read(self, stream: BinaryIO) -> None:
        for line in stream:
            os.write(2, line)
            if match := _TASK_ENDED.search(line):
                how = match[3].decode(errors="replace").strip()
                node = match[1].decode(errors="replace")
                self._deaths.append((int(match[2]), f"on {node}: {how}"))
            elif match := _NOT_STARTED.search(line):
                self._not_started = match[1].decode(errors="replace").strip()
