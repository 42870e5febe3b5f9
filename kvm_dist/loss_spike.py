"""When a loss stands out from those before it. Imports no torch."""

import statistics
from collections.abc import Sequence

from kvm_dist.config import TrainConfig

# A deviation below this share of the median counts as this much: losses that hardly move are no reason to
# take every ripple for a spike.
SMALLEST_DEVIATION = 1e-3


def loss_limit(train: TrainConfig, losses: Sequence[float]) -> float | None:
    """The largest loss of the next step that is no spike; None while nothing is one.

    losses: of the last steps. The limit is their median plus `loss_spike_deviations` times their median
    absolute deviation, known once `loss_spike_window` losses are.
    """
    if train.loss_spike == "ignore" or len(losses) < train.loss_spike_window:
        return None
    median = statistics.median(losses)
    deviation = statistics.median(abs(loss - median) for loss in losses)
    return median + train.loss_spike_deviations * max(deviation, SMALLEST_DEVIATION * abs(median))


def remembered(train: TrainConfig, losses: Sequence[float], loss: float) -> tuple[float, ...]:
    """`losses` and the one after them: what the next limit is computed from, and a checkpoint keeps."""
    if train.loss_spike == "ignore":
        return ()
    return (*losses, loss)[-train.loss_spike_window :]
