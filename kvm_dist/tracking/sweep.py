"""The parent run of a sweep: a file in the sweep's folder names it, its runs make it in the store.

Whoever submits a sweep waits for no server and needs neither mlflow nor torch: the first run that reaches the
store makes the parent, under a key that all share.
"""

import contextlib
import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvm_dist.tracking.protocol import RUN_KEY_TAG, Store

SWEEP_NAME = "sweep.json"
PARENT_TAG = "mlflow.parentRunId"


def declare_sweep(folder: Path, name: str, experiment: str, tags: Mapping[str, str]) -> str:
    """The key of the parent run of the sweep in `folder`, whose runs lie in folders below it.

    A folder has one parent for ever: later calls change nothing. Raises OSError if it cannot be written.
    """
    record = {"run_key": uuid.uuid4().hex, "name": name, "experiment": experiment, "tags": dict(tags)}
    folder.mkdir(mode=0o750, parents=True, exist_ok=True)
    partial = folder / f"{SWEEP_NAME}.{record['run_key']}"
    partial.write_text(json.dumps({**record, "time": time.time()}, indent=2) + "\n", encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        os.link(partial, folder / SWEEP_NAME)  # unlike a rename it never replaces the one of somebody faster
    partial.unlink()
    return str((read_sweep(folder) or record)["run_key"])


def read_sweep(folder: Path) -> dict[str, Any] | None:
    """What was declared for `folder`; None if it is no sweep's."""
    try:
        record = json.loads((folder / SWEEP_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "run_key" in record else None


def parent_run(store: Store, run_dir: Path) -> dict[str, str]:
    """The tag that puts the run in `run_dir` below its sweep's parent, made if needed; empty for others."""
    sweep = read_sweep(run_dir.parent)
    if sweep is None:
        return {}
    with _one_at_a_time(run_dir.parent):
        parent = store.find_run(sweep["experiment"], sweep["run_key"])
        if parent is None:
            parent = _create(store, sweep)
    return {PARENT_TAG: parent}


def _create(store: Store, sweep: Mapping[str, Any]) -> str:
    """It holds runs and does no work: it is finished at once, or nobody would be left to end it."""
    begun = round(float(sweep["time"]) * 1000)
    tags = {**sweep["tags"], RUN_KEY_TAG: sweep["run_key"]}
    parent = store.create_run(sweep["experiment"], sweep["name"], tags, begun)
    store.set_status(parent, "FINISHED", begun)
    return parent


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """The runs of a sweep start together: one of them makes the parent, the others find it."""
    with open(folder / f"{SWEEP_NAME}.lock", "w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: two at the same moment make two
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
