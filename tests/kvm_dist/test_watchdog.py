"""How long a rank may be silent."""

import pytest

from kvm_dist.watchdog import longest


@pytest.mark.parametrize(
    ("phase", "ranks", "times"),
    [
        ("forward", 2, 1.0),
        ("evaluate", 2, 10.0),
        ("start", 2, 10.0),  # NCCL waits for ever for a rank that does not come to connect
        ("start", 1, float("inf")),  # prepares data
        ("end", 2, float("inf")),
    ],
)
def test_no_phase_of_ranks_that_wait_for_each_other_lasts_for_ever_before_the_end(
    phase: str, ranks: int, times: float
) -> None:
    assert longest(phase, ranks) == times
