"""A rank that the others wait for is named, once."""

import logging
from pathlib import Path

import pytest

from kvm_dist.heartbeat import AVERAGED_STEPS, Beat, Heartbeat, read_beats
from kvm_dist.stragglers import Stragglers, slowest_rank


def beat(rank: int, own_seconds: float, averaged_steps: int = AVERAGED_STEPS) -> Beat:
    return Beat(rank, 1, 1, 1, "data", 0.0, f"node{rank}", 1, 1, own_seconds, averaged_steps)


def test_the_slowest_rank_is_compared_with_the_median_of_the_others() -> None:
    slowest = slowest_rank([beat(0, 1.0), beat(1, 3.0), beat(2, 1.2), beat(3, 1.1)], 4)
    assert slowest is not None
    assert (slowest.rank, slowest.host, slowest.median_seconds) == (1, "node1", 1.1)
    assert slowest.is_straggler


def test_two_ranks_are_enough_for_a_straggler() -> None:
    slowest = slowest_rank([beat(0, 0.2), beat(1, 0.1)], 2)
    assert slowest is not None
    assert (slowest.rank, slowest.ratio, slowest.is_straggler) == (0, 2.0, True)


def test_nobody_is_named_for_milliseconds_or_for_a_little() -> None:
    for seconds in ((0.001, 0.002), (1.0, 1.4)):
        slowest = slowest_rank([beat(0, seconds[0]), beat(1, seconds[1])], 2)
        assert slowest is not None
        assert not slowest.is_straggler


def test_ranks_are_compared_only_when_all_have_taken_enough_steps() -> None:
    assert slowest_rank([beat(0, 1.0), beat(1, 9.0, averaged_steps=AVERAGED_STEPS - 1)], 2) is None
    assert slowest_rank([beat(0, 1.0)], 2) is None


def take_steps(folder: Path, rank: int, seconds: float, waited: float) -> None:
    """Steps of a rank whose clock stands still but for `seconds` of forward, `waited` of which for others."""
    heartbeat = Heartbeat(folder, rank, 1)
    total = 0.0
    heartbeat.waited_seconds = lambda: total
    for step in range(AVERAGED_STEPS):
        heartbeat.begin_step(step + 1)
        heartbeat.beat("forward")
        heartbeat.beaten -= seconds
        total += waited
        heartbeat.beat("optimizer")
        heartbeat.beaten -= 100.0  # what does not count
    heartbeat.close()


def test_own_time_is_without_waiting_for_others(tmp_path: Path) -> None:
    take_steps(tmp_path / "beats", 0, seconds=5.0, waited=4.0)
    (found,) = read_beats(tmp_path / "beats")
    assert found.own_seconds == pytest.approx(1.0, abs=0.5)
    assert found.averaged_steps == AVERAGED_STEPS


def test_a_straggler_is_said_once_and_when_it_has_caught_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "beats"
    for rank in (0, 1):
        take_steps(folder, rank, seconds=2.0 + 4.0 * rank, waited=0.0)
    stragglers = Stragglers(folder, 1, 2, look_seconds=3600)
    with caplog.at_level(logging.WARNING):
        assert stragglers.metrics() == {}
        stragglers.look()
        stragglers.look()
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith("rank 1 on ")
        assert stragglers.metrics()["perf/slowest_rank"] == 1
        assert stragglers.metrics()["perf/slowest_rank_ratio"] == pytest.approx(3.0, rel=0.2)
        take_steps(folder, 1, seconds=2.0, waited=0.0)
        stragglers.look()
        assert caplog.messages[1:] == ["rank 1 is no longer slower than the others"]
    stragglers.close()
