"""Folders of ours with something wrong: what is said, under which exit code, and that nothing is left."""

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvm_dist.convert.exporting import export_model
from kvm_dist.convert.hugging_face import write_folder
from kvm_dist.convert.importing import import_published
from kvm_dist.convert.new_folder import new_folder, require_free
from kvm_dist.exit_codes import ConfigError, DataError, RunError, StorageError
from kvm_dist.pretrained import open_pretrained
from kvm_dist.sampling import sample
from models.published.settings import model_config
from tests.kvm_dist.converted import (
    GIGABYTE,
    content_of,
    published_copy,
    read_tensors,
    replace_tensors,
    split_in_two,
)
from tests.models.tiny import tiny_model

Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "ein Ordner mit Umlauten: äöü"
    write_folder(path, content_of(tiny_model(["kvm", "rwkv7"])), GIGABYTE, silent=True)
    return path


def settings(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))

    return change


def model(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        settings(model=json.loads((folder / "config.json").read_text())["model"] | changes)(folder)

    return change


def without_a_shard(folder: Path) -> None:
    split_in_two(folder)
    (folder / "part-0.safetensors").unlink()


def with_one_in_bfloat16(folder: Path) -> None:
    tensors = read_tensors(folder)
    tensors["backbone.head.weight"] = tensors["backbone.head.weight"].bfloat16()
    replace_tensors(folder, tensors)


def without_tensors(folder: Path) -> None:
    save_file({}, folder / "model.safetensors")


def cut_off(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (without_a_shard, StorageError, "names part-0.safetensors, which is missing; copy the folder again"),
        (cut_off, StorageError, r"model.safetensors: damaged or cut off \(.*copy the file again"),
        (without_tensors, DataError, "model.safetensors: holds no tensor, wanted the weights"),
        (with_one_in_bfloat16, DataError, "told which: --dtype float32 or --dtype bfloat16"),
        (settings(tie_word_embeddings=True), ConfigError, "tie_word_embeddings=true is not supported"),
        (settings(training="x"), ConfigError, "training='x', wanted lines of text for the model card"),
        (settings(evaluations=[1]), ConfigError, r"evaluations=\[1\], wanted lines of text"),
        (settings(training={"a": 3}), ConfigError, r"training={'a': 3}, wanted lines of text"),
        (settings(tokenizer="."), ConfigError, "tokenizer '.*' could not be loaded"),
        (model(num_layers=10**9), ConfigError, "model.num_layers: wanted a value <= 10000, got 1000000000"),
        (model(hidden_size=1 << 40), ConfigError, "model.hidden_size: wanted a value <= 1048576"),
        (model(vocab_size=1 << 70), ConfigError, "model.vocab_size: wanted a"),
        (model(ffn_expansion=1e30), ConfigError, "model.ffn_expansion: wanted a value <= 1000"),
    ],
)
def test_a_broken_folder_is_refused_and_nothing_is_left(
    folder: Path, tmp_path: Path, change: Change, error: type[RunError], message: str
) -> None:
    change(folder)
    with pytest.raises(error, match=message):
        open_pretrained(folder)
    with pytest.raises(error, match=message):
        export_model(folder, tmp_path / "out", "huggingface", None, GIGABYTE, silent=True)
    assert sorted(tmp_path.iterdir()) == [folder]


def test_a_text_that_needs_more_ids_than_the_model_has_is_refused(folder: Path) -> None:
    settings(tokenizer="rwkv-world")(folder)
    message = r"rwkv-world gives this text the id \d+, the model has 37 ids; .*data.tokenizer=NAME"
    with pytest.raises(ConfigError, match=message):
        sample(folder, "hello", tokens=1, temperature=0.0, seed=0)
    assert sample(folder, "\x03\x04", tokens=2, temperature=0.0, seed=0).startswith("\x03\x04")


def test_weights_of_two_dtypes_are_exported_in_the_one_that_is_wanted(folder: Path, tmp_path: Path) -> None:
    with_one_in_bfloat16(folder)
    for dtype in ("float32", "bfloat16"):
        export_model(folder, tmp_path / dtype, "huggingface", dtype, GIGABYTE, silent=True)
        found = {z.dtype for z in read_tensors(tmp_path / dtype).values()}
        assert found == {getattr(torch, dtype)}


def test_settings_that_take_all_memory_are_refused_at_once(tmp_path: Path) -> None:
    huge = {"num_hidden_layers": 10**9, "alt_layer_every": 10**9}
    folder = published_copy(tmp_path / "layers", **huge)
    with pytest.raises(ConfigError, match="num_hidden_layers=1000000000: Input should be less than or equal"):
        import_published(folder, tmp_path / "out", None, None, GIGABYTE, silent=True)
    folder = published_copy(tmp_path / "width", hidden_size=10**9)
    with pytest.raises(ConfigError, match="hidden_size=1000000000: Input should be less than or equal"):
        import_published(folder, tmp_path / "out", None, None, GIGABYTE, silent=True)
    assert not (tmp_path / "out").exists()


def test_alternative_layers_may_be_further_apart_than_there_are_layers(tmp_path: Path) -> None:
    settings = json.loads((published_copy(tmp_path / "theirs") / "config.json").read_text())
    kinds = model_config(settings | {"alt_layer_every": 10**12}).layer_kinds
    assert kinds == ["sliding_window", "kvm", "kvm", "kvm"]


@pytest.mark.parametrize("name", ["a file", "runs", "checkpoints", "an empty folder", "absent"])
def test_what_is_no_model_is_told_what_would_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").write_text("x")
    (tmp_path / "runs/quickstart/checkpoints/step-00000001").mkdir(parents=True)
    (tmp_path / "an empty folder").mkdir()
    path = tmp_path / "runs/quickstart/checkpoints" if name == "checkpoints" else tmp_path / name
    messages = {
        "a file": "is no folder; give a run directory",
        "checkpoints": r"give the run, .*quickstart, for its newest one, or one of them: kvm-dist checkpoint",
        "absent": "no such folder; give a run directory",
    }
    with pytest.raises(StorageError, match=messages.get(name, "holds no model: neither checkpoints/")):
        open_pretrained(path)
    with pytest.raises(StorageError, match=messages.get(name, "holds no model: neither checkpoints/")):
        export_model(path, tmp_path / "out", "huggingface", None, GIGABYTE, silent=True)


def test_the_name_of_a_run_alone_is_answered_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/mine").mkdir(parents=True)
    with pytest.raises(StorageError, match="mine: no such folder; did you mean runs/mine"):
        open_pretrained(Path("mine"))


def test_a_place_that_cannot_be_written_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="a file stands where a folder is wanted; give another path"):
        open_new(tmp_path / "file" / "below")
    for length in (255, 300):  # with the marks of an unfinished folder, and without
        with pytest.raises(StorageError, match="File name too long; make room or permissions, or give"):
            open_new(tmp_path / ("x" * length))


def open_new(out: Path) -> None:
    require_free(out)
    with new_folder(out, 1):
        pass


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody but the superuser may read or write."""
    path = tmp_path / "locked"
    path.mkdir()
    path.chmod(0)
    yield path
    path.chmod(stat.S_IRWXU)


def test_a_folder_that_may_not_be_read_is_named(locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != locked)  # the superuser may read it
    for action in (
        lambda: open_pretrained(locked),
        lambda: import_published(locked, locked.parent / "out", None, None, GIGABYTE, silent=True),
    ):
        with pytest.raises(StorageError, match="locked: cannot be read: Permission denied; ask its owner"):
            action()
