"""The tracking process: `python -m kvm_dist.tracking RUN_DIR` sends what lies in a run directory.

With `--parent` it lives as long as that trainer does, and a bounded time longer.
"""

import argparse
import contextlib
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvm_dist.exit_codes import ExitCode
from kvm_dist.tracking.address import absolute_uri, artifact_location, scrub, secrets_of, sqlite_path
from kvm_dist.tracking.events import EVENTS_NAME, RunStatus, append_end, has_ended
from kvm_dist.tracking.forwarder import Forwarder, Refused, RunGone, Store, Unavailable
from kvm_dist.tracking.tracker import URI_VARIABLE

_TICK_SECONDS = 0.2
_SEND_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 30.0
_LONGEST_LAST_PAUSE_SECONDS = 3.0
_NICENESS_VARIABLE = "KVM_DIST_TRACKING_NICENESS"
_LOWEST_PRIORITY = 19
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
_log = logging.getLogger("kvm_dist.tracking")


class TrackingProcess:
    """Pumps the spool until the trainer ended its run, died, or was followed by another one."""

    def __init__(self, run_dir: Path, forwarder: Forwarder, parent: int, drain_seconds: float) -> None:
        self._run_dir = run_dir
        self._forwarder = forwarder
        self._parent = parent
        self._drain_seconds = drain_seconds
        self._deadline: float | None = None
        self._closing = False
        self._failures = 0
        self._events_bytes = -1

    def run(self) -> ExitCode:
        """CRASH when the store could not be reached in time; the spool then waits for the next start."""
        next_send = 0.0
        while True:
            self._watch_trainer()
            if self._forwarder.superseded():
                return ExitCode.DONE
            if self._has_new_events() or time.monotonic() >= next_send:
                self._send()
                next_send = time.monotonic() + self._pause()
            if self._forwarder.ended:
                return ExitCode.DONE
            if self._deadline is not None and time.monotonic() >= self._deadline:
                return ExitCode.CRASH
            time.sleep(_TICK_SECONDS)

    def _watch_trainer(self) -> None:
        """A trainer that is gone without a word was killed: the run must not stay RUNNING."""
        if self._deadline is None and os.getppid() != self._parent:
            self._deadline = time.monotonic() + self._drain_seconds
            append_end(self._run_dir, self._forwarder.attempt, RunStatus.KILLED)

    def _has_new_events(self) -> bool:
        path = self._run_dir / EVENTS_NAME
        before, self._events_bytes = self._events_bytes, path.stat().st_size if path.exists() else 0
        if before == self._events_bytes:
            return False
        self._closing = has_ended(self._run_dir, self._forwarder.attempt)
        return True

    def _send(self) -> None:
        self._failures = 0 if try_to_send(self._forwarder) else self._failures + 1

    def _pause(self) -> float:
        longest = _LONGEST_LAST_PAUSE_SECONDS if self._closing else _LONGEST_PAUSE_SECONDS
        return float(min(_SEND_SECONDS * 2 ** min(self._failures, 8), longest))


def try_to_send(forwarder: Forwarder) -> bool:
    """One pass over the spool; whatever goes wrong is reported and tried again later."""
    try:
        forwarder.pump()
    except (Unavailable, RunGone, Refused) as error:
        _report(forwarder, str(error))
    except Exception as error:  # the last frame of this process: its trainer must not notice
        _log.exception("unexpected")
        _report(forwarder, f"{type(error).__name__}: {error}")
    else:
        return True
    return False


def _report(forwarder: Forwarder, problem: str) -> None:
    problem = scrub(problem, secrets_of(os.environ.get(URI_VARIABLE, "")))
    _log.warning("not sent yet: %s", problem)
    with contextlib.suppress(OSError):
        forwarder.report_problem(problem)


def open_store(uri: str, experiment: str) -> Store:
    """Imports mlflow only now: the process has stepped back behind the trainer before."""
    from kvm_dist.tracking.store import MlflowStore

    with _alone_at(sqlite_path(uri)):
        return MlflowStore(uri, artifact_location(uri, experiment))


@contextlib.contextmanager
def _alone_at(database: Path | None) -> Iterator[None]:
    """Several runs share one sqlite file; its schema must be made by one process alone."""
    if database is None:
        yield
        return
    with open(f"{database}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _alone_in(run_dir: Path, patience_seconds: float) -> Iterator[None]:
    """One tracking process a run: an older one leaves as soon as it sees that a new trainer started."""
    deadline = time.monotonic() + patience_seconds
    with open(run_dir / "tracking.lock", "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_TICK_SECONDS)
        yield


def step_back() -> None:
    """Training has the processor first, also where the kernel groups processes by session."""
    niceness = int(os.environ.get(_NICENESS_VARIABLE, _LOWEST_PRIORITY))
    os.nice(niceness)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness))


def log_to(path: Path, secrets: list[str]) -> None:
    class Scrubbed(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return scrub(super().format(record), secrets)

    path.parent.mkdir(mode=0o750, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(Scrubbed("%(asctime)s %(levelname)s %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False


def main(arguments: list[str]) -> ExitCode:
    parser = argparse.ArgumentParser("kvm_dist.tracking", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", help="the trainer's; without it everything is sent once")
    parser.add_argument("--parent", type=int, help="process id of the trainer")
    parser.add_argument("--drain-seconds", type=float, default=120.0)
    options = parser.parse_args(arguments)
    run_dir: Path = options.run_dir.absolute()
    uri = absolute_uri(os.environ.get(URI_VARIABLE) or f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    log_to(run_dir / "logs" / "tracking.log", secrets_of(uri))
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    forwarder = Forwarder(run_dir, lambda experiment: open_store(uri, experiment), options.attempt)
    if options.parent is None:
        with _alone_in(run_dir, options.drain_seconds):
            return ExitCode.DONE if try_to_send(forwarder) else ExitCode.CRASH
    step_back()
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to whole jobs; this one ends after its trainer
        signal.signal(number, signal.SIG_IGN)
    with _alone_in(run_dir, options.drain_seconds):
        return TrackingProcess(run_dir, forwarder, options.parent, options.drain_seconds).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
