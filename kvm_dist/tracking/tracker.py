"""The trainer's side of tracking: appends to files and returns at once; another process does the rest."""

import hashlib
import logging
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvm_dist.checkpoint.manifest import MANIFEST_NAME
from kvm_dist.config import RunConfig
from kvm_dist.metrics import METRICS_NAME, append_metrics
from kvm_dist.tracking.address import absolute_uri, is_secret_name, redact_uri
from kvm_dist.tracking.events import Kind, RunStatus, append_event

URI_VARIABLE = "KVM_DIST_TRACKING_URI"  # by environment: an argument would show in `ps`
_log = logging.getLogger(__name__)


class Tracker:
    """Rank 0's tracker. Metrics go to `metrics.jsonl` first; MLflow is fed from there by another process.

    No call raises or waits for a server, `close` apart, which waits up to `wait_seconds`.
    """

    def __init__(self, run_dir: Path, config: RunConfig, *, drain_seconds: float = 120.0) -> None:
        """Raises ConfigError for a URI that MLflow cannot write.

        drain_seconds: how long the process still tries to reach a lost server when the trainer is gone.
        """
        self.run_dir = run_dir
        self._attempt = uuid.uuid4().hex
        self._drain_seconds = drain_seconds
        self._uri = absolute_uri(config.tracking_uri) if config.tracking.enabled else None
        self._process: subprocess.Popen[bytes] | None = None
        self._said: set[str] = set()
        if self._uri is not None:
            self._event(Kind.START, description(config))
            self._start_process()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of an applied step."""
        try:
            append_metrics(self.run_dir / METRICS_NAME, step, metrics)
        except OSError as error:
            self._say(f"metrics of step {step} and later ones may be missing: {error}")

    def checkpoint(self, path: Path, step: int, digest: str | None = None) -> None:
        """Tells of a checkpoint by reference. `digest`: sha256 of its manifest, computed if None.

        A tracking process that has died in the meantime is started again.
        """
        try:
            if digest is None:
                digest = hashlib.sha256((path / MANIFEST_NAME).read_bytes()).hexdigest()
            size = sum(file.stat().st_size for file in path.iterdir())
        except OSError as error:
            self._say(f"checkpoint {path} is not tracked: {error}")
            return
        fields = {"path": str(path.absolute()), "step": step, "manifest_sha256": digest, "bytes": size}
        self._event(Kind.CHECKPOINT, fields)
        self._start_process_if_gone()

    def artifact(self, path: Path, folder: str = "") -> None:
        """Asks for a small file (a picture, a table) to be uploaded into `folder` of the run."""
        self._event(Kind.ARTIFACT, {"path": str(path.absolute()), "folder": folder})

    def close(self, status: RunStatus | str = RunStatus.FINISHED, wait_seconds: float = 30.0) -> bool:
        """Ends the tracked run; True if the store got everything (else it is sent at the next start)."""
        if self._uri is None:
            return True
        self._event(Kind.END, {"status": RunStatus(status)})
        self._start_process_if_gone()
        if self._process is None:
            return False
        try:
            delivered = self._process.wait(wait_seconds) == 0
        except subprocess.TimeoutExpired:
            delivered = False
        if not delivered:
            self._say(
                f"the tracking store has not got everything yet; see {self.run_dir / 'logs' / 'tracking.log'}"
            )
        return delivered

    def _event(self, kind: Kind, fields: Mapping[str, Any]) -> None:
        if self._uri is None:
            return
        try:
            append_event(self.run_dir, kind, self._attempt, fields)
        except OSError as error:
            self._say(f"{kind} is not tracked: {error}")

    def _start_process_if_gone(self) -> None:
        if self._uri is not None and (self._process is None or self._process.poll() is not None):
            self._start_process()

    def _start_process(self) -> None:
        assert self._uri is not None, "only an enabled tracker starts a process"
        command = [sys.executable, "-m", "kvm_dist.tracking", str(self.run_dir.absolute())]
        command += ["--attempt", self._attempt, "--parent", str(os.getpid())]
        command += ["--drain-seconds", str(self._drain_seconds)]
        try:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, URI_VARIABLE: self._uri},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._say(f"the tracking process does not start: {error}")

    def _say(self, problem: str) -> None:
        if problem not in self._said:
            self._said.add(problem)
            _log.warning("%s", problem)


class NullTracker(Tracker):
    """For the ranks that do not speak."""

    def __init__(self) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def checkpoint(self, path: Path, step: int, digest: str | None = None) -> None:
        pass

    def artifact(self, path: Path, folder: str = "") -> None:
        pass

    def close(self, status: RunStatus | str = RunStatus.FINISHED, wait_seconds: float = 30.0) -> bool:
        return True


def description(config: RunConfig) -> dict[str, Any]:
    """What the store is told of a run at its start; secrets are left out."""
    params = flatten(config.model_dump(mode="json"))
    digest = hashlib.sha256("\n".join(f"{key}={value}" for key, value in sorted(params.items())).encode())
    tags = {
        "mlflow.source.name": "kvm-dist train",
        "mlflow.source.git.commit": git_commit(),
        "kvm_dist.config_sha256": digest.hexdigest(),
    }
    return {"name": config.name, "experiment": config.tracking.experiment, "params": params, "tags": tags}


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
