"""Saves beside the steps: the same bytes, one at a time, and errors told where a person sees them."""

import itertools
import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvm_dist import checkpointing
from kvm_dist.checkpoint import newest_valid
from kvm_dist.checkpoint import save as save_module
from kvm_dist.checkpoint.layout import TensorSpec, lay_out
from kvm_dist.checkpoint.load import load_checkpoint
from kvm_dist.checkpoint.parts import Piece, create_files, read_share, write_share
from kvm_dist.checkpointing import CheckpointSaver
from kvm_dist.config import CheckpointConfig
from kvm_dist.counters import Counters
from kvm_dist.exit_codes import StorageError
from kvm_dist.tracking import NullTracker
from parallel.engine.deepspeed import OwnedTensors
from parallel.world import World


class OneParameter:
    """An engine whose optimizer holds one bfloat16 parameter."""

    def __init__(self) -> None:
        self.values = torch.arange(12, dtype=torch.float32) / 7

    def owned_tensors(self) -> list[OwnedTensors]:
        views = {"master": self.values, "exp_avg": self.values * 2, "exp_avg_sq": self.values * 3}
        return [OwnedTensors("weight", torch.bfloat16, (3, 4), 0, views)]

    def adam_step(self) -> float:
        return 5.0


def saver(folder: Path, asynchronous: bool = True) -> tuple[CheckpointSaver, OneParameter]:
    engine: Any = OneParameter()
    world: World = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))  # type: ignore[assignment]
    config = CheckpointConfig(keep=2, asynchronous=asynchronous)
    made = CheckpointSaver(
        folder, config, engine, world, NullTracker(), config_text="name: x\n", data_digest="d"
    )
    return made, engine


def held_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves are not written before this is set."""
    go = threading.Event()
    write = checkpointing.write_share

    def wait_then_write(*arguments: Any) -> None:
        assert go.wait(30)
        write(*arguments)

    monkeypatch.setattr(checkpointing, "write_share", wait_then_write)
    return go


def test_a_save_holds_the_step_it_was_begun_at_though_training_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, engine = saver(tmp_path / "waited", asynchronous=False)
    waited.save(Counters(step=1), {}, last=False)
    beside, engine = saver(tmp_path / "beside")
    go = held_back(monkeypatch)
    metrics = beside.save(Counters(step=1), {"perf/step_seconds": 2.0}, last=False)
    assert metrics["checkpoint/blocking_share"] == metrics["checkpoint/blocking_seconds"] / 2
    engine.values.mul_(-1)  # the next step
    assert beside.settle() == {}
    go.set()
    beside.finish()
    for name in ("model.safetensors", "optimizer.safetensors"):
        written = [tmp_path / kind / "step-00000001" / name for kind in ("waited", "beside")]
        assert written[0].read_bytes() == written[1].read_bytes()
    loaded = load_checkpoint(tmp_path / "beside" / "step-00000001")
    assert torch.equal(loaded.tensor("weight", "master").view(-1), -engine.values)
    assert torch.equal(loaded.tensor("weight"), loaded.tensor("weight", "master").bfloat16())


def test_a_save_is_told_of_once_it_is_in_place_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, _ = saver(tmp_path)
    told: list[tuple[bool, int]] = []
    monkeypatch.setattr(
        beside.tracker,
        "checkpoint",
        lambda path, step: told.append(((path / "manifest.json").exists(), step)),
    )
    go = held_back(monkeypatch)
    beside.save(Counters(step=1), {}, last=False)
    beside.settle()
    assert told == []
    go.set()
    beside.finish()
    assert told == [(True, 1)]


def test_the_memory_of_the_copy_is_made_before_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, engine = saver(tmp_path)

    def no_more(*_: object, **__: object) -> None:
        raise AssertionError("a save makes memory")

    monkeypatch.setattr("kvm_dist.checkpoint.snapshot.torch.zeros", no_more)
    monkeypatch.setattr("kvm_dist.checkpoint.snapshot.torch.empty", no_more)
    beside.save(Counters(step=1), {}, last=True)
    loaded = load_checkpoint(tmp_path / "step-00000001")
    assert torch.equal(loaded.tensor("weight", "master").view(-1), engine.values)


def test_a_save_is_read_back_while_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, sync = threading.Event(), os.fsync
    check = save_module._read_back

    def sync_later(descriptor: int) -> None:
        assert read.wait(30), "nothing is read back before all is synced"
        sync(descriptor)

    def read_back(*arguments: Any) -> Any:
        read.set()
        return check(*arguments)

    monkeypatch.setattr(save_module, "_read_back", read_back)
    monkeypatch.setattr("kvm_dist.checkpoint.parts.os.fsync", sync_later)
    beside, _ = saver(tmp_path)
    beside.save(Counters(step=1), {}, last=True)
    assert read.is_set()


def test_a_file_is_synced_while_others_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = lay_out("model", [TensorSpec(name, torch.float32, (2,)) for name in "ab"], 8)
    create_files(tmp_path, layouts)
    synced, sync, write = threading.Event(), os.fsync, os.pwrite

    def tell(descriptor: int) -> None:
        sync(descriptor)
        synced.set()

    def second_waits(descriptor: int, data: memoryview, offset: int) -> int:
        if bytes(data) == bytes(8):
            assert synced.wait(30), "no file is synced before all are written"
        return write(descriptor, data, offset)

    monkeypatch.setattr("kvm_dist.checkpoint.parts.os.fsync", tell)
    monkeypatch.setattr("kvm_dist.checkpoint.parts.os.pwrite", second_waits)
    write_share(tmp_path, layouts, [Piece("a", 0, torch.zeros(2)), Piece("b", 0, torch.ones(2))], 1)
    assert sorted(read_share(tmp_path, 1)) == [layout.name for layout in layouts]


def test_an_error_of_the_program_ends_the_save_at_once_and_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> None:
        raise RuntimeError("a fault of the program")

    beside, _ = saver(tmp_path)
    monkeypatch.setattr("kvm_dist.checkpoint.parts._write", wrong)
    beside.save(Counters(step=1), {}, last=False)
    with pytest.raises(RuntimeError, match="a fault of the program"):
        beside.finish()
    assert list(tmp_path.iterdir()) == []


def test_the_older_saves_are_removed_after_the_clock_of_a_save_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(checkpointing, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    monkeypatch.setattr(checkpointing, "prune", lambda *_, **__: next(ticks))
    beside, _ = saver(tmp_path)
    before = beside.save(Counters(step=1), {}, last=True)["checkpoint/save_seconds"]
    assert before == 1.0


def test_a_folder_that_another_node_shows_late_is_waited_for(tmp_path: Path) -> None:
    folder, made = tmp_path / "late", tmp_path / "made"
    made.mkdir()
    layouts = lay_out("model", [TensorSpec("weight", torch.float32, (2,))], 1 << 20)
    create_files(made, layouts)
    writer = threading.Thread(
        target=write_share, args=(folder, layouts, [Piece("weight", 0, torch.ones(2))], 1)
    )
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    made.rename(folder)
    writer.join(30)
    assert read_share(folder, 1)["model.safetensors"][0].size == 8


def test_the_next_save_waits_for_the_one_before_and_tells_how_long_that_took(tmp_path: Path) -> None:
    beside, _ = saver(tmp_path)
    beside.save(Counters(step=1), {}, last=False)
    assert "checkpoint/save_seconds" in beside.save(Counters(step=2), {}, last=False)
    assert (tmp_path / "step-00000001" / "manifest.json").exists()
    beside.save(Counters(step=3), {}, last=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_failure_beside_the_steps_is_told_and_only_the_last_save_must_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beside, _ = saver(tmp_path)
    beside.save(Counters(step=1), {}, last=True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr("kvm_dist.checkpoint.parts.os.fsync", full)
        assert beside.save(Counters(step=2), {}, last=False)["checkpoint/failed_saves"] == 0
        assert beside._settle() == {"checkpoint/failed_saves": 1.0}
        assert "step 2 was not saved, training goes on" in caplog.text
        assert "No space left" in caplog.text
        assert "need " in caplog.text
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        with pytest.raises(StorageError, match="No space left") as caught:
            beside.save(Counters(step=3), {}, last=True)
    assert caught.value.code == 74
    newest = newest_valid(tmp_path)
    assert newest is not None
    assert newest.step == 1
