"""Results of evaluations in the tracking store: on the run, and on the checkpoint's logged model."""

import contextlib
import fcntl
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvm_dist.config import RunConfig
from kvm_dist.tracking.address import absolute_uri
from kvm_dist.tracking.events import EVENTS_NAME, Kind, append_event, latest_attempt
from kvm_dist.tracking.lock import LOCK_NAME
from kvm_dist.tracking.tracker import URI_VARIABLE

_FOLDER = "evaluations"
_PATIENCE_SECONDS = 5.0
_LONGEST_SECONDS = 300.0


def track_evaluation(
    run_dir: Path, config: RunConfig, step: int, metrics: Mapping[str, float], files: Sequence[Path]
) -> bool | None:
    """Put metrics of the checkpoint of `step`, and small files, into the run's spool and have it sent.

    True: the store has them; False: they wait in the spool for a store that answers, or for the live run,
    which sends them itself. None: the run is not tracked. Raises OSError if the spool cannot be written.
    """
    attempt = latest_attempt(run_dir) if (run_dir / EVENTS_NAME).exists() else None
    if not config.tracking.enabled or attempt is None:
        return None
    finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
    if finite:
        append_event(run_dir, Kind.EVALUATION, attempt, {"step": step, "metrics": finite})
    for path in files:
        append_event(run_dir, Kind.ARTIFACT, attempt, {"path": str(path.absolute()), "folder": _FOLDER})
    if _is_sent_by_another(run_dir):
        return False
    # Without an address the store lies beside the run, wherever this process was started.
    address = {URI_VARIABLE: absolute_uri(config.tracking.uri)} if config.tracking.uri else {}
    command = [sys.executable, "-m", "kvm_dist.tracking", str(run_dir.absolute())]
    command += ["--drain-seconds", str(_PATIENCE_SECONDS)]
    try:
        ended = subprocess.run(
            command,
            env={**os.environ, **address},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_LONGEST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode == 0


def _is_sent_by_another(run_dir: Path) -> bool:
    """Whether the tracking process of a live run is there: it reads the spool already."""
    with _opened(run_dir / LOCK_NAME) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
