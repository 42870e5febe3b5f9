import pytest

from kvm_dist.config import OptimizerConfig, ScheduleConfig
from kvm_dist.optim.schedule import group_rates, schedule_factor


def test_warm_up_then_linear_decay_as_published():
    schedule = ScheduleConfig(warmup_steps=200)
    assert schedule_factor(schedule, 0, 6000) == 1 / 200
    assert schedule_factor(schedule, 199, 6000) == 1.0
    assert schedule_factor(schedule, 200, 6000) == 1.0
    assert schedule_factor(schedule, 3100, 6000) == 0.5
    assert schedule_factor(schedule, 5999, 6000) == pytest.approx(1 / 5800)


def test_final_fraction_is_the_floor_of_the_decay():
    schedule = ScheduleConfig(warmup_steps=0, final_fraction=0.1)
    assert schedule_factor(schedule, 0, 10) == 1.0
    assert schedule_factor(schedule, 10, 10) == pytest.approx(0.1)


def test_a_run_shorter_than_its_warm_up_still_reaches_the_peak():
    assert schedule_factor(ScheduleConfig(warmup_steps=200), 9, 10) == 1.0


def test_adamc_pull_is_the_square_of_the_rate_over_the_peak():
    optimizer = OptimizerConfig(learning_rate=2e-3, weight_decay=0.2)
    rate, decay = group_rates(optimizer, 0.25, 1.0, 1.0)
    assert rate * decay == pytest.approx(rate**2 / optimizer.learning_rate * optimizer.weight_decay)


def test_group_scales_multiply_rate_and_decay():
    optimizer = OptimizerConfig(learning_rate=2e-3, weight_decay=0.2)
    assert group_rates(optimizer, 1.0, 0.75, 4 / 3) == pytest.approx((1.5e-3, 0.2 * 4 / 3))
