"""`kvm-dist submit`: from a configuration to a job in Slurm's queue. Imports no torch."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvm_dist.config import RunConfig
from kvm_dist.exit_codes import ConfigError
from kvm_dist.load import dump_config
from kvm_dist.run_directory import MODE, RunDirectory, locked_run_directory
from kvm_dist.tracking.address import is_secret_name
from kvm_dist.tracking.description import COMMIT_VARIABLE, git_commit
from kvm_dist.tracking.sweep import declare_sweep
from launch.plan_table import print_plan
from launch.slurm import BatchJob, batch_script, submit
from launch.slurm_lead import lead_problem
from launch.submit_container import mounts_problem
from launch.submit_snapshot import copy_code
from launch.submit_sweep import Sweep, load_sweep

SLURM_FOLDER = "slurm"  # in a run directory, and in that of a sweep: submissions, job numbers, output
JOB_NAME = "job.json"


@dataclass(frozen=True)
class Submission:
    """What a job reads when it starts: one configuration per task, and the code that was current then."""

    configs: tuple[Path, ...]
    code: Path

    def write(self, path: Path) -> None:
        record = {"configs": [str(path) for path in self.configs], "code": str(self.code)}
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def read(path: Path) -> "Submission":
        record = json.loads(path.read_text(encoding="utf-8"))
        return Submission(tuple(map(Path, record["configs"])), Path(record["code"]))


def submit_run(config: Path, overrides: Sequence[str], dry_run: bool) -> None:
    """Queue the run of `config`, or one for every combination of values separated by commas."""
    sweep = load_sweep(config, overrides)
    for loaded in sweep.runs:
        _check(loaded.config)
    folder = _next_folder(sweep.folder.absolute() / SLURM_FOLDER)
    job = batch_job(sweep, folder)
    if dry_run:
        print(batch_script(job))
        _print_summary(sweep, job)
        return
    for loaded in sweep.runs:
        with locked_run_directory(loaded):
            pass  # the folder exists, nobody trains in it, and what is there has this configuration
    if len(sweep.runs) > 1:
        tags = {f"sweep.{key}": ", ".join(values) for key, values in sweep.choices.items()}
        declare_sweep(sweep.folder, sweep.name, sweep.runs[0].config.tracking.experiment, tags)
    _snapshot(sweep, folder)
    number = submit(job)
    _write_job_numbers(sweep, number, folder)
    _print_summary(sweep, job)
    print(f"job {number} is queued; kvm-dist status shows how far it is")


def batch_job(sweep: Sweep, folder: Path) -> BatchJob:
    """The job of `sweep`, whose snapshot lies in `folder`."""
    config = sweep.runs[0].config
    ranks = ranks_per_node(config)
    gpus = config.slurm.gpus_per_node
    if gpus is None:
        gpus = ranks if config.device == "cuda" else 0
    return BatchJob(
        name=sweep.name,
        slurm=config.slurm,
        tasks_per_node=ranks,
        gpus_per_node=gpus,
        command=[sys.executable, "-P", "-u", "-m", "launch.slurm_job", str(folder / "submission.json")],
        variables={
            "PYTHONPATH": os.pathsep.join(filter(None, (str(folder / "code"), os.environ.get("PYTHONPATH")))),
            "PYTHONSAFEPATH": "1",
            COMMIT_VARIABLE: git_commit(),
        },
        folder=folder,
        log=folder.parent / "output",
        tasks=len(sweep.runs),
    )


def ranks_per_node(config: RunConfig) -> int:
    """One task a rank. Raises ConfigError unless the ranks fill the nodes evenly."""
    ranks, nodes = config.parallel.world_size, config.slurm.nodes
    if ranks % nodes:
        raise ConfigError(
            f"slurm.nodes={nodes} does not divide the {ranks} ranks of parallel.data={config.parallel.data} "
            f"x parallel.sequence={config.parallel.sequence}; every node runs as many"
        )
    return ranks // nodes


def _check(config: RunConfig) -> None:
    ranks_per_node(config)
    secrets = [name for name in config.slurm.environment if is_secret_name(name)]
    if secrets:
        raise ConfigError(
            f"slurm.environment.{secrets[0]} looks like a secret and would be stored with the run; set it in "
            "the environment of `kvm-dist submit` instead, from where Slurm takes it along"
        )
    metrics = RunDirectory(config.run_directory).metrics_path
    for problem in (lead_problem(metrics, config.slurm.lead_seconds), mounts_problem(config)):
        if problem:
            print(f"kvm-dist: {problem}", file=sys.stderr)


def _next_folder(parent: Path) -> Path:
    """`parent/0001`, or the number after the last one there."""
    taken = [int(path.name) for path in parent.glob("[0-9]*") if path.name.isdigit()]
    return parent / f"{max(taken, default=0) + 1:04d}"


def _snapshot(sweep: Sweep, folder: Path) -> None:
    """Code and resolved configurations: what the job runs, whatever is edited while it waits."""
    for new in (folder.parent, folder):
        new.mkdir(MODE, parents=True, exist_ok=True)
    configs = []
    for number, loaded in enumerate(sweep.runs):
        path = folder / f"config-{number:04d}.yaml"
        path.write_text(dump_config(loaded.config), encoding="utf-8")
        configs.append(path)
    copy_code(folder / "code")
    Submission(tuple(configs), folder / "code").write(folder / "submission.json")


def _write_job_numbers(sweep: Sweep, number: str, folder: Path) -> None:
    """Into every run directory, for those who follow or stop the run."""
    for task, loaded in enumerate(sweep.runs):
        record = {
            "job": f"{number}_{task}" if len(sweep.runs) > 1 else number,
            "submitted": time.time(),
            "submission": str(folder / "submission.json"),
            "folder": os.getcwd(),
        }
        path = loaded.config.run_directory / SLURM_FOLDER / JOB_NAME
        path.parent.mkdir(MODE, exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _print_summary(sweep: Sweep, job: BatchJob) -> None:
    config = sweep.runs[0].config
    slurm = config.slurm
    print_plan(config, None, as_json=False)
    gpus = f" and GPUs: {job.gpus_per_node}" if job.gpus_per_node else ""
    print(
        f"nodes: {slurm.nodes}, each with ranks: {job.tasks_per_node}{gpus}; {slurm.time_minutes} min, told "
        f"to save {slurm.lead_seconds} s before the end, queued again up to {slurm.requeues} times"
    )
    for loaded in sweep.runs:
        print(f"  {loaded.config.run_directory}")
