"""A trainer without training: logs steps FIRST to LAST, then ends the run or waits to be killed."""

import sys
import time
from pathlib import Path

from kvm_dist.config import RunConfig, TrackingConfig
from kvm_dist.metrics import METRICS_NAME, truncate_after
from kvm_dist.tracking import Tracker


def main(root: str, uri: str, first: str, last: str, status: str) -> None:
    config = RunConfig(run_root=Path(root), name="sample", tracking=TrackingConfig(uri=uri))
    run_dir = config.run_directory
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text("name: sample\n")
    truncate_after(run_dir / METRICS_NAME, int(first) - 1)
    tracker = Tracker(run_dir, config, drain_seconds=200)
    for step in range(int(first), int(last) + 1):
        tracker.log(step, {"train/loss": 1 / step, "train/tokens": step})
    print("logged", flush=True)
    if status == "wait":
        time.sleep(600)
    print(tracker.close(status, wait_seconds=200), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
