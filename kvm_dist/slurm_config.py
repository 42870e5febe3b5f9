"""What a job asks of Slurm: the `slurm` key of a configuration. Imports no torch."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from parallel.config import FrozenConfig

LONGEST_DEFAULT_LEAD_SECONDS = 120
OPTION_NAME = re.compile(r"[a-z][a-z0-9-]*")
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OWNED_OPTIONS: dict[str, str] = {
    "account": "slurm.account",
    "array": "values with commas, such as optimizer.learning_rate=1e-3,2e-3",
    "chdir": "the folder that `kvm-dist submit` is called in",
    "constraint": "slurm.constraint",
    "cpus-per-task": "slurm.cpus_per_task",
    "error": "nothing: logs lie in the run directory",
    "exclusive": "slurm.exclusive",
    "export": "slurm.environment",
    "gpus-per-node": "slurm.gpus_per_node",
    "job-name": "name",
    "mem": "slurm.memory_gib",
    "nodes": "slurm.nodes",
    "no-requeue": "slurm.requeues=0",
    "ntasks": "parallel.data and parallel.sequence",
    "ntasks-per-node": "slurm.nodes",
    "open-mode": "nothing: logs grow over requeues",
    "output": "nothing: logs lie in the run directory",
    "partition": "slurm.partition",
    "qos": "slurm.qos",
    "requeue": "slurm.requeues",
    "reservation": "slurm.reservation",
    "signal": "slurm.signal_seconds",
    "time": "slurm.time_minutes",
    "wrap": "slurm.setup",
}

# Nothing that could end a line of a batch script or of a log.
Line = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f\u0085\u2028\u2029]+$")]


class ContainerConfig(FrozenConfig):
    """The image that the ranks run in; the batch script itself runs outside."""

    runtime: Literal["pyxis", "apptainer"] = Field(
        "pyxis", description="pyxis: options of srun; apptainer: a command"
    )
    image: Line = Field(description="such as rocm/pytorch:latest, or the path of a .sif or .sqsh file")
    mounts: list[Line] = Field(default=[], description="SOURCE:TARGET; run root and data must be among them")
    python: Line = Field("python", description="the interpreter inside the image")
    options: list[Line] = Field(default=[], description="further ones of the runtime, such as --rocm, --nv")


class SlurmConfig(FrozenConfig):
    """One job: its size, its queue, its limits, and how often it may go on by itself."""

    nodes: int = Field(1, ge=1)
    partition: Line | None = None
    time_minutes: int = Field(60, ge=1)
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    reservation: Line | None = None
    exclusive: bool = False
    memory_gib: int | None = Field(
        None, ge=0, description="per node; 0: all of it; null: the cluster's default"
    )
    cpus_per_task: int | None = Field(None, ge=1, description="CPU cores of a rank")
    gpus_per_node: int | None = Field(
        None, ge=0, description="null: one a rank where device=cuda, none otherwise"
    )
    signal_seconds: int | None = Field(
        None, ge=1, description="warning before the time limit; null: 120, or a quarter of a short limit"
    )
    requeues: int = Field(100, ge=0, description="how often the job may go on by itself")
    container: ContainerConfig | None = None
    setup: list[Line] = Field(default=[], description="shell lines before the ranks start: module load ...")
    environment: dict[str, Line] = Field(default={}, description="variables of the ranks; no secrets")
    sbatch: dict[str, bool | int | Line] = Field(
        default={}, description="further options, such as comment: x"
    )
    srun_args: list[Line] = Field(default=[], description="further options, such as --cpu-bind=cores")

    @property
    def lead_seconds(self) -> int:
        """Seconds between the signal and the time limit."""
        return self.signal_seconds or min(LONGEST_DEFAULT_LEAD_SECONDS, self.time_minutes * 60 // 4)

    @field_validator("sbatch")
    @classmethod
    def _options_are_free(cls, options: dict[str, bool | int | str]) -> dict[str, bool | int | str]:
        for name in options:
            if not OPTION_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no option of sbatch; wanted its long name without dashes before it, "
                    "such as mail-type"
                )
            if name in OWNED_OPTIONS:
                raise ValueError(f"{name} is set elsewhere; use {OWNED_OPTIONS[name]}")
        return options

    @field_validator("environment")
    @classmethod
    def _names_are_variables(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if not VARIABLE_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a variable; wanted letters, digits and _")
        return environment

    @model_validator(mode="after")
    def _signal_comes_within_the_limit(self) -> "SlurmConfig":
        if self.lead_seconds >= self.time_minutes * 60:
            raise ValueError(
                f"slurm.signal_seconds={self.signal_seconds} is not less than slurm.time_minutes="
                f"{self.time_minutes} ({self.time_minutes * 60} s): it would be told to stop at its start"
            )
        return self
