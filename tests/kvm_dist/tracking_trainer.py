"""A trainer without training: logs steps FIRST to LAST, then ends the run or waits to be killed.

With PAUSE it waits after that step for a line on its standard input, and then goes back by BACK steps, as
after a loss spike. Every fifth step is validated and saved; the first of them has the best loss, and behind
the return a later one is better than an earlier one.
"""

import sys
import time
from pathlib import Path

from kvm_dist.config import DataConfig, RunConfig, TrackingConfig
from kvm_dist.metrics import METRICS_NAME, truncate_after
from kvm_dist.system_metrics import NodeMetrics
from kvm_dist.tracking import Tracker


def main(root: str, uri: str, first: str, last: str, status: str, pause: str = "0", back: str = "0") -> None:
    data = DataConfig(path=Path(root, "corpus"))
    config = RunConfig(run_root=Path(root), name="sample", data=data, tracking=TrackingConfig(uri=uri))
    run_dir = config.run_directory
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text("name: sample\n")
    truncate_after(run_dir / METRICS_NAME, int(first) - 1)
    NodeMetrics(run_dir, "node1", [lambda: {"cpu_utilization_percentage": 50.0}]).sample()
    tracker = Tracker(run_dir, config, drain_seconds=200)
    take_steps(tracker, int(first), int(pause) or int(last), rollbacks=0)
    if int(pause):
        print("paused", flush=True)
        input()
        went_back_to = int(pause) - int(back)
        truncate_after(run_dir / METRICS_NAME, went_back_to)
        take_steps(tracker, went_back_to + 1, int(last), rollbacks=int(int(back) > 0))
    print("logged", flush=True)
    if status == "wait":
        time.sleep(600)
    print(tracker.close(status, wait_seconds=300), flush=True)


def take_steps(tracker: Tracker, first: int, last: int, rollbacks: int) -> None:
    for step in range(first, last + 1):
        take_step(tracker, step, rollbacks)


def take_step(tracker: Tracker, step: int, rollbacks: int) -> None:
    metrics = {"train/loss": rollbacks + 1 / step, "train/tokens": float(step)}
    metrics["fault/rollbacks"] = float(rollbacks)
    if step % 5 == 0:
        metrics["validation/loss"] = 200.0 - step if rollbacks else float(step)
        checkpoint = tracker.run_dir / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "manifest.json").write_text("{}\n")
        tracker.checkpoint(checkpoint, step)
    tracker.log(step, metrics)


if __name__ == "__main__":
    main(*sys.argv[1:])
