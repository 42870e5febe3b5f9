"""Saves that are killed, and disks that are full."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvm_dist.checkpoint import newest_valid, verify_checkpoint
from kvm_dist.checkpoint.load import load_checkpoint
from kvm_dist.checkpoint.save import free_bytes, save_checkpoint
from kvm_dist.exit_codes import StorageError
from tests.kvm_dist.checkpoint_samples import sample_tensors, save_sample


@contextlib.contextmanager
def saver_factory(checkpoints: Path) -> Iterator[Callable[[int, float], None]]:
    """Gives a function that starts saves without end at a step and kills the process after some seconds."""
    command = [sys.executable, "-m", "tests.kvm_dist.checkpoint_samples", str(checkpoints)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as factory:
        assert factory.stdin is not None
        assert factory.stdout is not None
        asked, told = factory.stdin, factory.stdout

        def save_and_kill(step: int, seconds: float) -> None:
            print(step, file=asked, flush=True)
            saver = int(told.readline())
            time.sleep(seconds)
            os.kill(saver, signal.SIGKILL)
            assert told.readline() == "killed\n", "the saver ended before it was killed"

        yield save_and_kill
        asked.close()


def test_a_save_killed_at_any_instant_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(0)
    save_sample(tmp_path, 1)
    reached = 1
    unfinished = 0
    with saver_factory(tmp_path) as save_and_kill:
        for _ in range(20):
            save_and_kill(reached + 1, rng.uniform(0.01, 0.2))
            newest = newest_valid(tmp_path)
            assert newest is not None
            assert newest.step >= reached
            reached = newest.step
            loaded = load_checkpoint(newest.path)
            for name, kinds in sample_tensors(reached):
                assert (loaded.tensor(name, "exp_avg_sq") == kinds["exp_avg_sq"]).all()
            unfinished += any(tmp_path.glob("*.partial-*"))
    assert unfinished, "no kill hit a save: the test shows nothing"


def test_killed_saves_stop_at_the_rename_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    save_sample(tmp_path, 1)
    for name in ("put_in_place", "verify_checkpoint", "_seal", "_write_rest"):
        with monkeypatch.context() as patch:
            patch.setattr(f"kvm_dist.checkpoint.save.{name}", die)
            with pytest.raises(Killed):
                save_sample(tmp_path, 2)
        newest = newest_valid(tmp_path)
        assert newest is not None
        assert newest.step == 1


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_a_full_disk_costs_the_new_save_only(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        checkpoints = disk / "checkpoints"
        first = save_sample(checkpoints, 1)
        (disk / "filler").write_bytes(bytes(free_bytes(disk) - first.bytes // 2))
        with pytest.raises(StorageError, match=r"No space left.*need \d+ bytes, have \d+") as caught:
            save_checkpoint(
                checkpoints, 2, sample_tensors(2), rng_states=[], state={}, config_text="", expected_bytes=1
            )
        assert caught.value.code == 74
        assert [path.name for path in checkpoints.iterdir()] == ["step-00000001"]
        verify_checkpoint(first.path)
        (disk / "filler").unlink()
        save_sample(checkpoints, 2)


def test_too_little_space_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = save_sample(tmp_path, 1)
    monkeypatch.setattr("kvm_dist.checkpoint.save.free_bytes", lambda _: 17)
    tensors = sample_tensors(2)
    with pytest.raises(StorageError, match=f"need {first.bytes} bytes, have 17"):
        save_checkpoint(tmp_path, 2, tensors, rng_states=[], state={}, config_text="")
    assert next(tensors, None) is None, "other ranks wait until the collective iterator is used up"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_an_unwritable_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="checkpoints"):
        save_sample(tmp_path / "checkpoints", 1)


def test_a_disk_that_stores_something_else_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flip_a_bit(folder: Path) -> None:
        path = folder / "state.json"
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        verify_checkpoint(folder)

    monkeypatch.setattr("kvm_dist.checkpoint.save.verify_checkpoint", flip_a_bit)
    with pytest.raises(StorageError, match=r"state\.json"):
        save_sample(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []
