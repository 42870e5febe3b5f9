"""The tracking process: `python -m kvm_dist.tracking RUN_DIR` sends what lies in a run directory.

With `--parent` it lives as long as that trainer does, and a bounded time longer.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path

from kvm_dist.exit_codes import ExitCode
from kvm_dist.tracking.address import absolute_uri, artifact_location, scrub, secrets_of, sqlite_path
from kvm_dist.tracking.events import EVENTS_NAME, RunStatus, append_end, has_ended
from kvm_dist.tracking.forwarder import Forwarder, Refused, RunGone, Store, Unavailable
from kvm_dist.tracking.lock import alone_at, alone_in
from kvm_dist.tracking.tracker import URI_VARIABLE, niceness

_TICK_SECONDS = 0.2
_SEND_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 30.0
_LONGEST_LAST_PAUSE_SECONDS = 3.0
_SCHEMA_SECONDS = 20.0  # for another run to make the tables of a database that both write
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

    try:
        with alone_at(sqlite_path(uri), _SCHEMA_SECONDS):
            return MlflowStore(uri, artifact_location(uri, experiment))
    except BlockingIOError as error:
        raise Unavailable("another process makes the tables of the database") from error


def step_back() -> None:
    """Training has the processor first, also where the kernel groups processes by session."""
    steps = niceness()
    os.nice(steps)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(steps))


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
    parser.add_argument(
        "--in-front", action="store_true", help="training is over: nothing to stand back from"
    )
    parser.add_argument("--take-over", action="store_true", help="from a process of a trainer that has ended")
    options = parser.parse_args(arguments)
    run_dir: Path = options.run_dir.absolute()
    uri = absolute_uri(os.environ.get(URI_VARIABLE) or f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    log_to(run_dir / "logs" / "tracking.log", secrets_of(uri))
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if options.parent is not None:
        if not options.in_front:
            step_back()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            # sent to whole jobs; this one ends after its trainer
            signal.signal(number, signal.SIG_IGN)
    takes_over = options.take_over or options.parent is not None
    try:
        with alone_in(run_dir, options.drain_seconds, sqlite_path(uri), takes_over):
            return _track(run_dir, uri, options)
    except BlockingIOError:
        _log.warning("another process sends what lies here, and has not ended in %g s", options.drain_seconds)
        return ExitCode.CRASH


def _track(run_dir: Path, uri: str, options: argparse.Namespace) -> ExitCode:
    forwarder = Forwarder(run_dir, lambda experiment: open_store(uri, experiment), options.attempt)
    if options.parent is None:
        return ExitCode.DONE if try_to_send(forwarder) else ExitCode.CRASH
    return TrackingProcess(run_dir, forwarder, options.parent, options.drain_seconds).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
