"""The trainer's side of tracking: appends to files and returns at once; another process does the rest."""

import hashlib
import logging
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvm_dist.checkpoint.folder import list_checkpoints
from kvm_dist.checkpoint.manifest import MANIFEST_NAME
from kvm_dist.config import RunConfig
from kvm_dist.exit_codes import StorageError
from kvm_dist.metrics import METRICS_NAME, append_metrics
from kvm_dist.tracking.address import absolute_uri
from kvm_dist.tracking.description import description
from kvm_dist.tracking.events import Kind, RunStatus, append_event, read_events
from kvm_dist.tracking.forwarder import read_state

PROMPT_SECONDS = 10.0  # for a process that stands back to send the last; then another does it in front
NICENESS_VARIABLE = "KVM_DIST_TRACKING_NICENESS"
LOWEST_PRIORITY = 19
URI_VARIABLE = "KVM_DIST_TRACKING_URI"  # by environment: an argument would show in `ps`
_log = logging.getLogger(__name__)


class Tracker:
    """Rank 0's tracker. Metrics go to `metrics.jsonl` first; MLflow is fed from there by another process.

    No call raises or waits for a server, `close` apart, which waits up to `wait_seconds`.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        *,
        tags: Mapping[str, str] = MappingProxyType({}),
        drain_seconds: float = 120.0,
    ) -> None:
        """Raises ConfigError for a URI that MLflow cannot write.

        tags: of the run, beside those of its configuration and surroundings.
        drain_seconds: how long the process still tries to reach a lost server when the trainer is gone.
        """
        self.run_dir = run_dir
        self._attempt = uuid.uuid4().hex
        self._drain_seconds = drain_seconds
        self._uri = absolute_uri(config.tracking_uri) if config.tracking.enabled else None
        self._process: subprocess.Popen[bytes] | None = None
        self._said: set[str] = set()
        if self._uri is not None:
            start = description(config)
            self._event(Kind.START, start | {"tags": start["tags"] | dict(tags)})
            self._start_process()
            self._tell_what_a_kill_hid()

    @property
    def process_id(self) -> int | None:
        """Of the tracking process; None if there is none."""
        return None if self._process is None else self._process.pid

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
        delivered = self._wait(min(PROMPT_SECONDS, wait_seconds))
        if delivered is None and wait_seconds > PROMPT_SECONDS:
            stood_back = self._process
            if niceness() and not read_state(self.run_dir).get("problem"):
                # Others keep the processor busy, maybe; training is over: nothing to stand back from.
                self._start_process("--in-front")
            delivered = self._wait(wait_seconds - PROMPT_SECONDS)
            if stood_back is not None:
                stood_back.poll()  # the other one has ended it
        if not delivered:
            self._say(
                f"the tracking store has not got everything yet; see {self.run_dir / 'logs' / 'tracking.log'}"
            )
        return bool(delivered)

    def _wait(self, seconds: float) -> bool | None:
        """Whether the process has sent everything, None if it has not ended by then."""
        if self._process is None:
            return False
        try:
            return self._process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return None

    def _tell_what_a_kill_hid(self) -> None:
        """A save may have been completed by an attempt that did not live to tell of it."""
        try:
            told = {event.get("path") for event in read_events(self.run_dir)}
            for checkpoint in list_checkpoints(self.run_dir):
                if checkpoint.complete and str(checkpoint.path.absolute()) not in told:
                    self.checkpoint(checkpoint.path, checkpoint.step)
        except (OSError, StorageError) as error:
            self._say(f"older checkpoints are not tracked: {error}")

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

    def _start_process(self, *options: str) -> None:
        assert self._uri is not None, "only an enabled tracker starts a process"
        command = [sys.executable, "-m", "kvm_dist.tracking", str(self.run_dir.absolute())]
        command += ["--attempt", self._attempt, "--parent", str(os.getpid())]
        command += ["--drain-seconds", str(self._drain_seconds), *options]
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


def niceness() -> int:
    """How far the tracking process stands back behind training."""
    return int(os.environ.get(NICENESS_VARIABLE, LOWEST_PRIORITY))


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
