"""Who is silent, from beats and stacks alone."""

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvm_dist.hang import find_silent
from kvm_dist.heartbeat import Beat, Heartbeat, process_state, read_beats
from kvm_dist.run_lock import process_start
from kvm_dist.stacks import is_waiting, stack_path

WAITING = """Thread 0x01 (most recent call first):
  File "/lib/threading.py", line 1 in wait
  File "/repo/kvm_dist/watchdog.py", line 2 in _pause

Thread 0x02 (most recent call first):
  File "/lib/torch/distributed/distributed_c10d.py", line 3 in all_reduce
  File "/repo/parallel/collectives.py", line 4 in sum
  File "/repo/kvm_dist/trainer.py", line 5 in run
"""
BUSY = WAITING.replace("/lib/torch/distributed/distributed_c10d.py", "/lib/somewhere.py")
# The handle of a message waits in C: the frame is that of whoever has it.
SWAPPING = WAITING.replace(
    "/lib/torch/distributed/distributed_c10d.py", "/repo/parallel/sequence/all_to_all.py"
)


READING = WAITING.replace("/lib/torch/distributed/distributed_c10d.py", "/lib/deepspeed/runtime/utils.py")


def beat(rank: int, **changes: object) -> Beat:
    """Of a process that lives: this one."""
    own = process_start(os.getpid()) or 0
    plain = Beat(rank, 1, 10, 3, "backward", time.time() - 5, socket.gethostname()[:64], os.getpid(), own)
    return replace(plain, **changes)  # type: ignore[arg-type]


def write_stacks(folder: Path, *texts: str) -> list[Path]:
    paths = [stack_path(folder, rank) for rank in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return paths


def test_a_rank_that_never_beat_is_silent(tmp_path: Path) -> None:
    hang = find_silent([beat(0), beat(2)], [], 3, 1)
    assert (hang.rank, hang.phase) == (1, "start")


def test_a_rank_whose_process_is_gone_is_silent(tmp_path: Path) -> None:
    stacks = write_stacks(tmp_path, WAITING, WAITING)
    hang = find_silent([beat(0), beat(1, pid=2**22 + 1, count=12)], stacks, 2, 1)
    assert hang.rank == 1
    assert "is gone" in hang.cause


def test_a_rank_that_is_behind_is_silent(tmp_path: Path) -> None:
    stacks = write_stacks(tmp_path, BUSY, BUSY, WAITING)
    hang = find_silent([beat(0), beat(1), beat(2, count=9, phase="data", step=2)], stacks, 3, 1)
    assert (hang.rank, hang.step, hang.phase, hang.ranks) == (2, 2, "data", (2,))


def test_of_ranks_at_the_same_place_the_one_that_waits_for_nobody_is_silent(tmp_path: Path) -> None:
    stacks = write_stacks(tmp_path, WAITING, BUSY, WAITING)
    assert find_silent([beat(0), beat(1), beat(2)], stacks, 3, 1).rank == 1


def test_a_stack_that_is_missing_counts_at_once_here_and_after_the_beats_elsewhere(tmp_path: Path) -> None:
    stacks = write_stacks(tmp_path, WAITING)
    assert find_silent([beat(0, count=9), beat(1)], stacks, 2, 1).rank == 1
    assert find_silent([beat(0, count=9), beat(1, host="elsewhere")], stacks, 2, 1).rank == 0
    assert find_silent([beat(0), beat(1, host="elsewhere")], stacks, 2, 1).rank == 1


def test_a_rank_that_has_ended_is_not_the_silent_one(tmp_path: Path) -> None:
    stacks = write_stacks(tmp_path, WAITING, WAITING)
    assert find_silent([beat(0), beat(1, phase="end", pid=2**22 + 1)], stacks, 2, 1).rank == 0


@pytest.mark.parametrize(
    ("text", "waits"), [(WAITING, True), (SWAPPING, True), (READING, True), (BUSY, False), ("", None)]
)
def test_only_the_thread_that_trains_counts_as_waiting(text: str, waits: bool | None) -> None:
    assert is_waiting(text) is waits


def test_a_beat_replaces_the_one_before_and_old_attempts_are_not_read(tmp_path: Path) -> None:
    Heartbeat(tmp_path / "beats", 1, attempt=1).close()
    heartbeat = Heartbeat(tmp_path / "beats", 0, attempt=2)
    heartbeat.begin_step(1)
    heartbeat.beat("optimizer")
    heartbeat.begin_step(100)
    (found,) = read_beats(tmp_path / "beats")
    assert (found.rank, found.attempt, found.step, found.phase, found.count) == (0, 2, 100, "data", 3)
    assert process_state(found) == "running"
    assert [old.rank for old in read_beats(tmp_path / "beats", 1)] == [1]


def test_a_disk_that_refuses_beats_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "beats").write_text("a file where the folder should be")
    heartbeat = Heartbeat(tmp_path / "beats", 0, attempt=1)
    heartbeat.begin_step(1)
    heartbeat.close()
    assert read_beats(tmp_path / "beats") == []
