"""Which losses are spikes."""

from typing import Any

import pytest

from kvm_dist.config import TrainConfig
from kvm_dist.counters import Counters
from kvm_dist.loss_spike import SMALLEST_DEVIATION, loss_limit, remembered


def train(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({"loss_spike": "skip", "loss_spike_window": 5, **changes})


def test_the_limit_lies_deviations_above_the_median() -> None:
    losses = (3.0, 2.0, 4.0, 3.5, 2.5)  # median 3, deviations 0, 1, 1, 0.5, 0.5: median 0.5
    assert loss_limit(train(loss_spike_deviations=4), losses) == 5.0


def test_nothing_is_a_spike_before_the_window_is_full_or_if_nobody_asked() -> None:
    assert loss_limit(train(), (1.0,) * 4) is None
    assert loss_limit(train(loss_spike="ignore"), (1.0,) * 5) is None


def test_losses_that_stand_still_leave_room_for_a_ripple() -> None:
    assert loss_limit(train(loss_spike_deviations=10), (2.0,) * 5) == 2.0 * (1 + 10 * SMALLEST_DEVIATION)


def test_one_spike_in_the_window_hardly_moves_the_limit() -> None:
    calm = (3.0, 3.1, 2.9, 3.05, 2.95)
    limit, after = loss_limit(train(), calm), loss_limit(train(), (*calm[1:], 50.0))
    assert limit is not None
    assert after is not None
    assert after < 2 * limit


def test_only_the_last_losses_are_remembered_and_a_checkpoint_keeps_them() -> None:
    losses: tuple[float, ...] = ()
    for number in range(8):
        losses = remembered(train(), losses, number / 3)
    assert losses == tuple(number / 3 for number in range(3, 8))
    assert remembered(train(loss_spike="ignore"), (), 1.0) == ()
    counters = Counters(step=8, recent_losses=losses)
    assert Counters.from_dict(counters.to_dict()) == counters


def test_counters_of_a_checkpoint_from_before_spikes_were_known_are_read() -> None:
    state = Counters(step=3).to_dict()
    del state["rollbacks"], state["recent_losses"]
    assert Counters.from_dict(state) == Counters(step=3)
    del state["position"]
    with pytest.raises(KeyError, match="position"):
        Counters.from_dict(state)
