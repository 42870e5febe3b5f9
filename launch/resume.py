"""`kvm-dist resume`: start the run of a directory again, the way it was started. Imports no torch."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from kvm_dist.attempts import read_attempts
from kvm_dist.exit_codes import ConfigError, ExitCode
from kvm_dist.run_directory import RunDirectory
from launch.status_queue import queued_jobs
from launch.status_run import find_run, read_status


def resume_run(run: Path, run_root: Path, overrides: Sequence[str], here: bool) -> int:
    """Go on from the newest checkpoint: in Slurm's queue if it was submitted, else here. The exit code."""
    path = find_run(run, run_root).absolute()
    status = read_status(path, queued_jobs())
    if status.live:
        raise ConfigError(f"{path}: the run is {status.state} already; stop it first: kvm-dist stop {path}")
    if status.state == "finished":
        print(f"{path} is finished: {status.step} steps")
        return int(ExitCode.DONE)
    config = RunDirectory(path).config_path
    _return_to(working_folder(path))
    changes = [f"run_root={path.parent}", f"name={path.name}", *overrides]
    if (path / "slurm" / "job.json").exists() and not here:
        from launch.submit import submit_run

        submit_run(config, changes, dry_run=False)
        return int(ExitCode.DONE)
    from launch.local import train_locally

    return train_locally(config, changes)


def working_folder(path: Path) -> Path | None:
    """Where the run was started, which the relative paths of its configuration are meant from."""
    attempts = read_attempts(path)
    if attempts and attempts[-1].folder:
        return Path(attempts[-1].folder)
    try:
        return Path(json.loads((path / "slurm" / "job.json").read_text())["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _return_to(folder: Path | None) -> None:
    if folder is None or folder == Path.cwd():
        return
    try:
        os.chdir(folder)
    except OSError as error:
        raise ConfigError(
            f"the run was started in {folder}, which cannot be entered ({error.strerror}); start it with "
            "kvm-dist train CONFIG from where its paths are right"
        ) from error
