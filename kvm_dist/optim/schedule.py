"""The learning rate as a pure function of applied steps: nothing to save, nothing to restore."""

from kvm_dist.config import OptimizerConfig, ScheduleConfig


def schedule_factor(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Share of the peak learning rate at applied step `step` of `steps`.

    Warm-up is (step + 1) / warmup_steps; then linear from 1 to `final_fraction`
    at `steps` (arXiv 2605.09877, App. D).
    """
    warmup = min(schedule.warmup_steps, steps)
    if step < warmup:
        return (step + 1) / warmup
    remaining = (steps - step) / max(steps - warmup, 1)
    return schedule.final_fraction + (1.0 - schedule.final_fraction) * remaining


def group_rates(
    optimizer: OptimizerConfig, factor: float, learning_rate_scale: float, weight_decay_scale: float
) -> tuple[float, float]:
    """Learning rate and weight decay of one parameter group at one step.

    AdamC: the decay is scaled by learning_rate(t) / peak, so that the pull on a weight is
    learning_rate(t)^2 / peak * weight_decay.
    """
    learning_rate = optimizer.learning_rate * factor * learning_rate_scale
    weight_decay = optimizer.weight_decay * factor * weight_decay_scale
    return learning_rate, weight_decay
