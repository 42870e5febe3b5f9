"""Batch scripts and their submission through submitit. Nothing is pickled: a job is a command and a file."""

import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError

from kvm_dist.exit_codes import ConfigError, CrashError
from kvm_dist.slurm_config import SlurmConfig

# What a launcher leaves in the environment: a job that inherited it would take it for its own.
STRAY_PREFIXES = (
    "SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "PMI_", "PMI2_", "PMIX_", "OMPI_", "SUBMITIT_", "TORCHELASTIC_"
)  # fmt: skip
STRAY_NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"
)  # fmt: skip
KEPT_NAMES = ("SLURM_CONF",)
PARALLEL_TASKS_OF_AN_ARRAY = 256


@dataclass(frozen=True)
class BatchJob:
    """One job, or an array of `tasks` jobs. command: what every one runs, once, on its first node."""

    name: str
    slurm: SlurmConfig
    tasks_per_node: int
    gpus_per_node: int
    command: Sequence[str]
    variables: dict[str, str]
    folder: Path
    log: Path
    tasks: int = 1


def batch_script(job: BatchJob) -> str:
    """The text that sbatch gets. Needs no Slurm."""
    return _executor(job)._make_submission_file_text(_shell_command(job), uid="")


def submit(job: BatchJob) -> str:
    """Hand `job` to sbatch, from a clean environment; its number. Raises ConfigError if it is refused."""
    if shutil.which("sbatch") is None:
        raise CrashError(
            "there is no sbatch here: call `kvm-dist submit` on a login node, or `kvm-dist train` to run "
            "here; --dry-run shows the script anywhere"
        )
    try:
        with clean_environment():
            submitted = _executor(job)._submit_command(_shell_command(job))
    except (FailedJobError, FailedSubmissionError) as error:
        raise ConfigError(f"sbatch refused the job: {_last_words(error)}") from error
    return str(submitted.job_id)


@contextmanager
def clean_environment() -> Iterator[None]:
    """os.environ without what belongs to a job or world that we may be part of."""
    stray = {name: value for name, value in os.environ.items() if is_stray(name)}
    for name in stray:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(stray)


def is_stray(name: str) -> bool:
    """Whether a variable speaks of a job or a rank instead of a machine or a person."""
    return name not in KEPT_NAMES and (name in STRAY_NAMES or name.startswith(STRAY_PREFIXES))


class _Executor(SlurmExecutor):
    """submitit's, also on machines without Slurm: scripts can be shown there."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def _executor(job: BatchJob) -> _Executor:
    executor = _Executor(folder=job.folder)
    executor.update_parameters(**_parameters(job))
    if job.tasks > 1:
        executor.parameters["map_count"] = job.tasks
    return executor


def _parameters(job: BatchJob) -> dict[str, Any]:
    """In submitit's names; what it has no name for goes through as it is."""
    slurm = job.slurm
    own = {
        "requeue" if slurm.requeues else "no-requeue": True,
        "chdir": os.getcwd(),
        "output": str(job.log).replace("%", "%%") + ("-%A_%a.out" if job.tasks > 1 else "-%j.out"),
        "reservation": slurm.reservation,
        **slurm.sbatch,
    }
    given = {
        "job_name": job.name,
        "nodes": slurm.nodes,
        "ntasks_per_node": job.tasks_per_node,
        "time": slurm.time_minutes,
        "signal_delay_s": slurm.lead_seconds,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "exclusive": slurm.exclusive or None,
        "mem": None if slurm.memory_gib is None else f"{slurm.memory_gib}G" if slurm.memory_gib else "0",
        "cpus_per_task": slurm.cpus_per_task,
        "gpus_per_node": job.gpus_per_node or None,
        "array_parallelism": PARALLEL_TASKS_OF_AN_ARRAY,
        "stderr_to_stdout": True,
        "use_srun": False,
        "setup": [*_exports(slurm.environment), *slurm.setup],
        "additional_parameters": {
            name: value for name, value in own.items() if value is not None and value is not False
        },
    }
    return {name: value for name, value in given.items() if value is not None}


def _exports(variables: dict[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def _shell_command(job: BatchJob) -> str:
    lines = [*_exports(job.variables), f"exec {shlex.join(job.command)}"]
    return "\n".join(lines)


def _last_words(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if "error:" in line]
    return "; ".join(lines) or str(error)
