"""Saving, loading, verifying and choosing checkpoints."""

import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from kvm_dist.checkpoint import Manifest, list_checkpoints, newest_valid, prune, verify_checkpoint
from kvm_dist.checkpoint.layout import part_size
from kvm_dist.checkpoint.load import load_checkpoint
from kvm_dist.checkpoint.rng import capture_rng, restore_rng, seed_rng
from kvm_dist.exit_codes import StorageError
from tests.kvm_dist.checkpoint_samples import CONFIG_TEXT, sample_tensors, save_sample, save_tensors

CPU = torch.device("cpu")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_form = a.dtype == b.dtype and a.shape == b.shape
    return same_form and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def file_names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in save_sample(tmp_path / "probe", 1).path.iterdir())


def test_a_round_trip_keeps_every_bit_of_every_tensor(tmp_path: Path) -> None:
    info = save_sample(tmp_path, 50)
    assert info.path.name == "step-00000050"
    loaded = load_checkpoint(info.path)
    assert (loaded.step, loaded.state["position"], loaded.config_text) == (50, 150, CONFIG_TEXT)
    for name, kinds in sample_tensors(50):
        for kind, tensor in kinds.items():
            assert same_bits(loaded.tensor(name, kind), tensor), (name, kind)
    assert loaded.names == [name for name, _ in sample_tensors(50)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signed_zeros_infinities_empty_and_strided_tensors_survive(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    odd = {
        "zeros": torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-40], dtype=dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
        "scalar": torch.tensor(-0.0, dtype=dtype),
        "strided": torch.randn(5, 7).to(dtype).t(),
    }
    info = save_tensors(tmp_path, 1, odd, ranks=3)
    loaded = load_checkpoint(info.path)
    assert all(same_bits(loaded.tensor(name), tensor.contiguous()) for name, tensor in odd.items())


def test_a_master_of_the_weights_own_dtype_is_stored_once(tmp_path: Path) -> None:
    loaded = load_checkpoint(save_sample(tmp_path, 1).path)
    optimizer = set(loaded._optimizer)
    assert "master.layers.0.weight" not in optimizer
    assert "master.layers.1.weight" in optimizer
    assert loaded.has("layers.0.weight", "master")


def test_a_large_model_is_cut_into_parts_of_bounded_size(tmp_path: Path) -> None:
    files = verify_checkpoint(save_sample(tmp_path, 1, part_bytes=2048).path).files
    parts = [name for name in files if name.startswith("optimizer-")]
    assert len(parts) > 3
    assert parts == [f"optimizer-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    whole = verify_checkpoint(save_sample(tmp_path / "whole", 1, part_bytes=1 << 30).path).files
    assert {"model.safetensors", "optimizer.safetensors", "rng.safetensors"} <= set(whole)


def test_files_are_many_enough_to_work_at_side_by_side_and_neither_tiny_nor_huge() -> None:
    mebi = 1 << 20
    assert part_size(0) == part_size(16 * 64 * mebi) == 64 * mebi
    assert part_size(16 * 100 * mebi) == 100 * mebi
    assert part_size(10**12) == 1024 * mebi


@pytest.mark.parametrize("damage", ["truncated", "one bit flipped", "deleted", "replaced by a link"])
def test_damage_to_any_file_is_found_and_the_file_is_named(tmp_path: Path, damage: str) -> None:
    for name in file_names(tmp_path):
        checkpoint = save_sample(tmp_path / name / damage, 7).path
        hurt(checkpoint / name, damage)
        with pytest.raises(StorageError, match=name):
            verify_checkpoint(checkpoint)
        with pytest.raises(StorageError, match=name):
            load_checkpoint(checkpoint)


def hurt(path: Path, damage: str) -> None:
    content = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[:-1])
    elif damage == "one bit flipped":
        place = len(content) // 2
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    elif damage == "replaced by a link":
        elsewhere = path.parent.parent / "elsewhere"
        elsewhere.write_bytes(content)
        path.symlink_to(elsewhere)


def test_every_single_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    checkpoint = save_sample(tmp_path, 7).path
    path = checkpoint / "manifest.json"
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        for bit in (0, 5):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            with pytest.raises(StorageError, match=r"manifest\.json"):
                verify_checkpoint(checkpoint)
    path.write_bytes(content)
    verify_checkpoint(checkpoint)


def test_an_extra_file_is_named(tmp_path: Path) -> None:
    checkpoint = save_sample(tmp_path, 7).path
    (checkpoint / "pickle.pt").write_bytes(b"x")
    with pytest.raises(StorageError, match=r"pickle\.pt"):
        verify_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["../state.json", "/etc/passwd", "a/b", "", ".", "..", "manifest.json"])
def test_a_manifest_may_name_plain_files_only(tmp_path: Path, name: str) -> None:
    checkpoint = save_sample(tmp_path, 7).path
    path = checkpoint / "manifest.json"
    manifest = Manifest.model_validate(json.loads(path.read_text()))
    files = dict(manifest.files) | {name: manifest.files["state.json"]}
    path.write_text(manifest.model_copy(update={"files": files}).sealed().text())
    with pytest.raises(StorageError, match="not a plain file name"):
        verify_checkpoint(checkpoint)


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    checkpoint = save_sample(tmp_path, 7).path
    path = checkpoint / "manifest.json"
    path.write_text(path.read_text().replace('"step": 7', '"step": 8'))
    with pytest.raises(StorageError, match="changed after the save"):
        verify_checkpoint(checkpoint)


def test_a_renamed_folder_is_not_taken_for_another_step(tmp_path: Path) -> None:
    save_sample(tmp_path, 1)
    save_sample(tmp_path, 2).path.rename(tmp_path / "step-00000009")
    newest = newest_valid(tmp_path)
    assert newest is not None
    assert newest.step == 1


def test_the_newest_valid_checkpoint_wins_and_the_log_says_why(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save_sample(tmp_path, step)
    (tmp_path / "step-00000020.partial-0badcafe").mkdir()
    hurt(tmp_path / "step-00000015" / "rng.safetensors", "one bit flipped")
    hurt(tmp_path / "step-00000010" / "manifest.json", "deleted")
    said: list[str] = []
    newest = newest_valid(tmp_path, said.append)
    assert newest is not None
    assert (newest.step, newest.valid) == (5, True)
    assert ["step-00000015" in line and "rng.safetensors" in line for line in said] == [True, False]
    assert "manifest.json" in said[1]


def test_no_valid_checkpoint_among_many_is_an_error_and_none_at_all_is_not(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "nothing") is None
    (tmp_path / "step-00000005.partial-0badcafe").mkdir()
    assert newest_valid(tmp_path) is None
    hurt(save_sample(tmp_path, 5).path / "state.json", "truncated")
    with pytest.raises(StorageError, match=r"none of the 1 checkpoints.*state\.json") as caught:
        newest_valid(tmp_path)
    assert caught.value.code == 74


def test_listing_shows_what_is_there_and_verifies_on_request(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save_sample(tmp_path / "checkpoints", step)
    hurt(tmp_path / "checkpoints" / "step-00000010" / "config.yaml", "one bit flipped")
    hurt(tmp_path / "checkpoints" / "step-00000015" / "config.yaml", "truncated")
    listed = list_checkpoints(tmp_path)
    assert [(info.step, info.valid, info.complete) for info in listed] == [
        (5, None, True),
        (10, None, True),
        (15, False, False),
    ]
    assert [info.valid for info in list_checkpoints(tmp_path, verify=True)] == [True, False, False]
    assert listed[0].bytes == sum(
        p.stat().st_size for p in listed[0].path.iterdir() if p.name != "manifest.json"
    )


def test_retention_keeps_the_newest_good_ones(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        save_sample(tmp_path, step)
    (tmp_path / "step-00000020.partial-0badcafe").mkdir()
    hurt(tmp_path / "step-00000015" / "config.yaml", "truncated")
    (tmp_path / "my notes").mkdir()
    prune(tmp_path, keep=2, verified=tmp_path / "step-00000020")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my notes", "step-00000010", "step-00000020"]


def test_retention_never_deletes_the_last_good_one(tmp_path: Path) -> None:
    for step in (5, 10):
        save_sample(tmp_path, step)
    hurt(tmp_path / "step-00000010" / "rng.safetensors", "one bit flipped")
    prune(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    hurt(tmp_path / "step-00000005" / "state.json", "one bit flipped")
    with pytest.raises(StorageError):
        prune(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_after_going_back_the_abandoned_newer_checkpoints_are_removed(tmp_path: Path) -> None:
    for step in (10, 20, 15):
        saved = save_sample(tmp_path, step)
    prune(tmp_path, keep=2, verified=saved.path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000015"]


def test_saving_a_step_again_replaces_it_and_the_old_one_stands_in_meanwhile(tmp_path: Path) -> None:
    old = save_sample(tmp_path, 5)
    parked = old.path.rename(tmp_path / "step-00000005.replaced-0badcafe")
    newest = newest_valid(tmp_path)
    assert newest is not None
    assert newest.path == parked
    save_sample(tmp_path, 5)
    again = save_sample(tmp_path, 5)
    newest = newest_valid(tmp_path)
    assert newest is not None
    assert newest.path == again.path
    prune(tmp_path, keep=3, verified=again.path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_trouble_while_deleting_is_logged_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "not allowed", str(path))

    for step in (5, 10):
        save_sample(tmp_path, step)
    monkeypatch.setattr("shutil.rmtree", refuse)
    with caplog.at_level(logging.WARNING):
        assert prune(tmp_path, keep=1) == []
    assert "not allowed" in caplog.text


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))]


@pytest.mark.parametrize("half_used_gaussians", [False, True])
def test_random_state_of_every_rank_survives_a_save(tmp_path: Path, half_used_gaussians: bool) -> None:
    seed_rng(1, 0, 0, CPU)
    if half_used_gaussians:
        random.gauss(0, 1)
        np.random.randn()
    states = [capture_rng(CPU)]
    expected = [draw()]
    seed_rng(1, 1, 0, CPU)
    states.append(capture_rng(CPU))
    expected.append(draw())
    info = save_tensors(tmp_path, 3, {}, rng_states=states)
    loaded = load_checkpoint(info.path)
    assert loaded.ranks == 2
    for rank in (1, 0):
        saved = loaded.rng(rank)
        assert saved is not None
        restore_rng(saved, CPU)
        assert draw() == expected[rank]
    assert loaded.rng(2) is None


def test_seeded_streams_differ_by_seed_rank_and_step_and_repeat() -> None:
    streams = []
    for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]:
        seed_rng(*key, CPU)
        streams.append(tuple(draw()))
    assert streams[0] == streams[4]
    for column in zip(*streams[:4], strict=True):
        assert len(set(column)) == 4
