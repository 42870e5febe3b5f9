"""What a person and the tracking store learn of a run while it goes on. All ranks compute, rank 0 speaks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvm_dist.counters import Counters
from kvm_dist.progress import Progress
from kvm_dist.step import StepOutcome
from kvm_dist.tracking import Tracker


class Reporter:
    """Turns step outcomes into metrics, a progress line and tracked values."""

    def __init__(self, tracker: Tracker, progress: Progress, log_every_steps: int) -> None:
        self.tracker = tracker
        self.progress = progress
        self.log_every_steps = log_every_steps
        self._begun = time.perf_counter()
        self._productive_seconds = 0.0
        self._data_seconds = 0.0

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._data_seconds = time.perf_counter() - begun

    def step_metrics(self, counters: Counters, outcome: StepOutcome) -> dict[str, float]:
        self._productive_seconds += outcome.seconds
        of_host = {} if outcome.host_fraction is None else {"perf/host_fraction": outcome.host_fraction}
        return of_host | {
            "train/loss": outcome.loss,
            "train/grad_norm": outcome.gradient_norm,
            "train/learning_rate": outcome.learning_rate,
            "train/tokens": counters.tokens,
            "perf/tokens_per_second": outcome.tokens / (outcome.seconds + self._data_seconds),
            "perf/step_seconds": outcome.seconds,
            "data/wait_seconds": self._data_seconds,
            "data/lost_shards": len(counters.damaged),
            "data/corrupt_records": sum(counters.damaged.values()),
            "fault/restarts": counters.restarts,
            "fault/skipped_steps": counters.skipped_steps,
            "fault/rollbacks": counters.rollbacks,
            "fault/goodput": self._productive_seconds / (time.perf_counter() - self._begun),
        }

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Every `log_every_steps` steps, and whenever there is more to tell than a step's own numbers."""
        self.progress.update(step, metrics)
        special = "validation/loss" in metrics or any(name.startswith("checkpoint/") for name in metrics)
        if special or step % self.log_every_steps == 0:
            self.tracker.log(step, metrics)
