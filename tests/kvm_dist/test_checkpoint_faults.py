"""Saves that are killed, and disks that are full."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvm_dist.checkpoint import newest_valid, save, verify_checkpoint
from kvm_dist.checkpoint.load import load_checkpoint
from kvm_dist.checkpoint.save import free_bytes
from kvm_dist.exit_codes import StorageError
from tests.kvm_dist.checkpoint_samples import sample_tensors, save_sample


@contextlib.contextmanager
def saver_factory(checkpoints: Path) -> Iterator[Callable[[int, float], None]]:
    """Gives a function that starts saves without end at a step and kills the process some seconds later."""
    command = [sys.executable, "-m", "tests.kvm_dist.checkpoint_samples", str(checkpoints)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as factory:
        assert factory.stdin is not None
        assert factory.stdout is not None
        asked, told = factory.stdin, factory.stdout

        def save_and_kill(step: int, seconds: float) -> None:
            before = set(checkpoints.iterdir())
            print(step, file=asked, flush=True)
            saver = int(told.readline())
            deadline = time.monotonic() + 60
            while set(checkpoints.iterdir()) <= before:  # the clock runs from the first save on
                assert time.monotonic() < deadline, "no save was begun"
                time.sleep(0.001)
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
            save_and_kill(reached + 1, rng.uniform(0, 0.05))
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
    for name in ("put_in_place", "verify_files", "_seal", "_write_texts", "_read_back"):
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
def test_a_full_disk_costs_the_new_save_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        checkpoints = disk / "checkpoints"
        first = save_sample(checkpoints, 1)
        (disk / "filler").write_bytes(bytes(free_bytes(disk) - first.bytes // 2))
        monkeypatch.setattr("kvm_dist.checkpoint.save.free_bytes", lambda _: 1 << 40)
        with pytest.raises(StorageError, match=r"No space left.*need \d+ bytes, have \d+") as caught:
            save_sample(checkpoints, 2)
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
    with pytest.raises(StorageError, match=r"need \d+ bytes, have 17") as caught:
        save_sample(tmp_path, 2)
    needed = int(str(caught.value).split("need ")[1].split()[0])
    assert first.bytes < needed < first.bytes + 100_000
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_an_unwritable_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="checkpoints"):
        save_sample(tmp_path / "checkpoints", 1)


def flip_a_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("name", "before"), [("state.json", "verify_files"), ("rng.safetensors", "_read_back")]
)
def test_a_disk_that_stores_something_else_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, before: str
) -> None:
    check = getattr(save, before)

    def damage_first(*arguments: Any) -> Any:
        flip_a_bit(next(tmp_path.glob(f"*.partial-*/{name}")))
        return check(*arguments)

    monkeypatch.setattr(save, before, damage_first)
    with pytest.raises(StorageError, match=re.escape(name)):
        save_sample(tmp_path, 1, part_bytes=1 << 30)
    assert list(tmp_path.iterdir()) == []
