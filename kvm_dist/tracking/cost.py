"""What a tracking server that never answers costs a step: `python -m kvm_dist.tracking.cost`.

It wants a quiet machine. Steps with and without tracking take turns in one process, so that a machine that
slows down slows both.
"""

import argparse
import os
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvm_dist.config import RunConfig, TrackingConfig
from kvm_dist.tracking.tracker import Tracker

_METRICS = {f"train/value_{number}": 1.0 for number in range(12)}  # as many as a step of training logs
_SIZE = 512


def main() -> None:
    parser = argparse.ArgumentParser("kvm_dist.tracking.cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="pairs of turns")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    parser.add_argument("--milliseconds", type=float, default=50.0, help="about what a step takes")
    options = parser.parse_args()
    _work(1)  # the first product starts threads
    repeats = max(1, round(options.milliseconds / 1000 / (_seconds(20) / 20)))
    with _tracker_of_a_dead_server() as tracker:
        shares = [_one_pair(tracker, number, options.steps, repeats) for number in range(options.rounds)]
    low, _, high = statistics.quantiles(shares, n=4) if len(shares) > 1 else shares * 3
    print(
        f"a step with a dead tracking server takes {statistics.median(shares):+.2%} "
        f"(quartiles {low:+.2%} to {high:+.2%}) of {_seconds(repeats) * 1000:.0f} ms more"
    )


def _one_pair(tracker: Tracker, number: int, steps: int, repeats: int) -> float:
    """How much longer tracked steps take, as a share; who goes first changes from pair to pair."""
    took = {}
    for tracked in (True, False) if number % 2 else (False, True):
        _let_run(tracker, tracked)
        begun = time.perf_counter()
        for step in range(number * steps, (number + 1) * steps):
            _work(repeats)
            if tracked:
                tracker.log(step, _METRICS)
        took[tracked] = time.perf_counter() - begun
    return took[True] / took[False] - 1


def _let_run(tracker: Tracker, running: bool) -> None:
    assert tracker.process_id is not None, "it was started with the tracker"
    os.kill(tracker.process_id, signal.SIGCONT if running else signal.SIGSTOP)


@contextmanager
def _tracker_of_a_dead_server() -> Iterator[Tracker]:
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = RunConfig(run_root=Path(folder), name="cost", tracking=TrackingConfig(uri=uri))
        config.run_directory.mkdir()
        tracker = Tracker(config.run_directory, config)
        try:
            yield tracker
        finally:
            assert tracker.process_id is not None, "it was started with the tracker"
            os.kill(tracker.process_id, signal.SIGKILL)


def _seconds(repeats: int) -> float:
    begun = time.perf_counter()
    _work(repeats)
    return time.perf_counter() - begun


def _work(repeats: int) -> None:
    matrix = np.ones((_SIZE, _SIZE), np.float32)
    for _ in range(repeats):
        matrix @ matrix


if __name__ == "__main__":
    main()
