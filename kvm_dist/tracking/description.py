"""What the store is told of a run at its start: its configuration, data and surroundings, no secrets."""

import hashlib
import os
import socket
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from kvm_dist.attempts import current_attempt
from kvm_dist.config import RunConfig
from kvm_dist.data.index import load_index
from kvm_dist.exit_codes import DataError
from kvm_dist.origin import origin_tags
from kvm_dist.run_directory import RunDirectory
from kvm_dist.tracking.address import is_secret_name, redact_uri
from kvm_dist.tracking.protocol import Dataset

COMMIT_VARIABLE = "KVM_DIST_COMMIT"  # set for jobs, which run a copy of the code outside the clone
_SLURM_TAGS = {
    "slurm.job_id": ("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID"),
    "slurm.array_task": ("SLURM_ARRAY_TASK_ID",),
    "slurm.nodes": ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    "slurm.partition": ("SLURM_JOB_PARTITION",),
    "slurm.restarts": ("SLURM_RESTART_COUNT",),
}


def description(config: RunConfig, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The fields of a start event."""
    params = flatten(config.model_dump(mode="json"))
    digest = hashlib.sha256("\n".join(f"{key}={value}" for key, value in sorted(params.items())).encode())
    tags = {
        "mlflow.source.name": "kvm-dist train",
        "mlflow.source.git.commit": environment.get(COMMIT_VARIABLE) or git_commit(),
        "kvm_dist.config_sha256": digest.hexdigest(),
        "kvm_dist.version": _version(),
        "kvm_dist.attempt": str(current_attempt(config.run_directory)),
        "kvm_dist.host": socket.gethostname(),
        "kvm_dist.layout": layout(config),
        **origin_tags(RunDirectory(config.run_directory)),
        **slurm_tags(environment),
    }
    return {
        "name": config.name,
        "experiment": config.tracking.experiment,
        "params": params,
        "tags": tags,
        "datasets": [dataset._asdict() for dataset in datasets(config)],
    }


def layout(config: RunConfig) -> str:
    """In words, as the trainer announces it."""
    how = config.parallel
    return f"{how.data} data x {how.sequence} sequence ranks, ZeRO-{how.zero_stage}, {how.precision}"


def slurm_tags(environment: Mapping[str, str]) -> dict[str, str]:
    """The job this process is part of; empty outside of Slurm."""
    tags = {}
    for tag, names in _SLURM_TAGS.items():
        value = next((environment[name] for name in names if environment.get(name)), None)
        if value is not None:
            tags[tag] = value
    return tags


def datasets(config: RunConfig) -> list[Dataset]:
    """Both splits of the prepared data; none where there is no readable index, which training reports."""
    try:
        index = load_index(config.data.path)
    except (DataError, OSError):
        return []
    name, source = config.data.path.name, redact_uri(str(config.data.path.absolute()))
    return [
        Dataset(f"{name}/{split}", source, index.digest, index.tokens(split), split)
        for split in ("train", "validation")
    ]


def flatten(tree: Any, prefix: str = "") -> dict[str, str]:
    """`{"a": {"b": 1}}` -> `{"a.b": "1"}`. Lists stay one value; what looks like a secret is hidden."""
    if isinstance(tree, dict):
        found: dict[str, str] = {}
        for key, value in tree.items():
            found |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
        return found
    if is_secret_name(prefix.rpartition(".")[2]):
        return {prefix: "***"}
    return {prefix: redact_uri(str(tree))}


def git_commit() -> str:
    """The commit this program runs from, `-dirty` if files differ; `unknown` outside a clone."""
    folder = Path(__file__).parent
    head = _git(folder, "rev-parse", "HEAD")
    changed = head and _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if changed else head or "unknown"


def _version() -> str:
    try:
        return metadata.version("kvm-dist")
    except metadata.PackageNotFoundError:
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
