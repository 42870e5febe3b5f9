"""On a real Slurm of two nodes: jobs end, are stopped, lose ranks and nodes, and lose no step."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvm_dist.attempts import STOP_MARKER
from tests.launch.slurm_counting import CountingRun
from tests.launch.slurm_run import slurm
from tests.launch.tiny_run import SIGKILL
from tests.support import slurm_cluster

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing()),
]


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[CountingRun]:
    run = CountingRun(tmp_path)
    yield run
    run.cancel()
    for node in slurm_cluster.NODES:
        slurm_cluster.start_node(node)


def test_a_job_is_queued_again_after_a_signal_and_a_killed_rank(counting: CountingRun) -> None:
    counting.submit()
    counting.wait_until_counted(2)
    slurm("scancel", "--signal=USR2", counting.job)
    counting.start_again_now()
    assert counting.codes() == [75]
    assert not (counting.directory / "postmortem.json").exists()

    counting.wait("second start", lambda: len(counting.codes()) == 2)
    counting.wait_until_counted(counting.counted(1) + 2)
    os.kill(counting.pid(1), SIGKILL)
    counting.wait(
        "end of the attempt", lambda: len(counting.codes()) == 2 and counting.codes()[1] is not None
    )
    (counting.directory / "finish").touch()
    counting.start_again_now()
    assert counting.codes()[:2] == [75, 70], counting.output()
    assert "rank 1 of 2 on node2: Killed" in counting.output()

    counting.wait_for_end()
    assert counting.codes()[-1] == 0, counting.output()
    assert not list((counting.directory / "slurm").glob(f"ends-{counting.job}-3"))


@pytest.mark.parametrize("how", ["cancelled", "stopped"])
def test_a_job_that_somebody_ends_stays_ended(how: str, counting: CountingRun) -> None:
    counting.submit()
    counting.wait_until_counted(2)
    if how == "stopped":
        (counting.directory / STOP_MARKER).touch()
        slurm("scancel", "--signal=USR2", counting.job)
    else:
        slurm("scancel", counting.job)
    counting.wait("end", lambda: counting.codes() == [75])
    counting.wait_for_end()
    assert "is not queued again" in counting.output()


def test_a_stopped_job_is_resumed_as_another_one(counting: CountingRun) -> None:
    counting.submit()
    counting.wait_until_counted(2)
    said = counting.command("stop", str(counting.directory))
    assert f"job {counting.job} was asked to save and stop" in said
    assert f"go on with: kvm-dist resume {counting.directory}" in said
    assert counting.codes() == [75]

    first, counted = counting.job, counting.counted(1)
    counting.resume()
    assert counting.job != first
    counting.wait_until_counted(counted + 1)
    (counting.directory / "finish").touch()
    counting.wait_for_end()
    assert counting.codes() == [75, 0], counting.output()


def test_a_crash_loop_ends_by_itself(counting: CountingRun) -> None:
    counting.directory.mkdir(parents=True)
    (counting.directory / "crash").touch()
    counting.submit()
    for tries in (1, 2):
        counting.wait("crash", lambda tries=tries: counting.codes() == [70] * tries)
        counting.start_again_now()
    counting.wait_for_end()
    assert counting.codes() == [70, 70, 70]
    assert "code 93" in counting.output()


@pytest.fixture
def grace() -> Iterator[Callable[[int], None]]:
    """Sets how long a job may still run when another needs its nodes."""

    def set_grace(seconds: int) -> None:
        slurm("scontrol", "update", "partitionname=main", f"gracetime={seconds}")

    yield set_grace
    set_grace(60)


@pytest.mark.parametrize("seconds", [60, 0], ids=["with time to save", "at once"])
def test_a_job_that_makes_room_for_another_comes_back(
    seconds: int, counting: CountingRun, grace: Callable[[int], None]
) -> None:
    grace(seconds)
    counting.submit()
    counting.wait_until_counted(2)
    all_of_it = ["-p", "urgent", "-N2", "--exclusive", "-t1", "-o", "/dev/null", "--wrap=sleep 1"]
    other = slurm("sbatch", "--parsable", *all_of_it)
    counting.wait("end of the first start", lambda: counting.codes() == [75])
    assert "does not queue it again" not in counting.output()
    counting.wait("end of the other job", lambda: slurm("squeue", "-h", "-j", other) == "")
    counting.start_again_now()
    counting.wait("second start", lambda: len(counting.codes()) == 2)
    (counting.directory / "finish").touch()
    counting.wait_for_end()
    assert counting.codes() == [75, 0], counting.output()


def test_a_job_whose_node_is_lost_comes_back(counting: CountingRun) -> None:
    counting.submit()
    counting.wait_until_counted(2)
    rank = counting.pid(1)
    counting.lose_node("node2")
    # What survived there would be ended later, by the number of its job: with it a start that came too soon.
    assert not Path(f"/proc/{rank}").exists()
    (counting.directory / "finish").touch()
    counting.start_again_now()
    counting.wait_for_end()
    assert counting.codes()[-1] == 0, counting.output()
    assert len(counting.codes()) == 2
