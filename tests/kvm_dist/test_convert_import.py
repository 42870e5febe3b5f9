"""Published checkpoints into folders of ours: the same logits, and every way in which one can be wrong."""

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import kvm_dist.convert.weights
import models.hf  # noqa: F401
from kvm_dist.convert.importing import import_published
from kvm_dist.convert.published import write_published
from kvm_dist.exit_codes import ConfigError, DataError, RunError, StorageError
from kvm_dist.pretrained import open_pretrained
from models.published.names import name_map
from tests.kvm_dist.converted import (
    GIGABYTE,
    content_of,
    logits_of,
    published_copy,
    read_tensors,
    replace_tensors,
    same,
    split_in_two,
    write_index,
)
from tests.models.golden import GOLDEN
from tests.models.tiny import tiny_batch, tiny_model

FAMILIES = ["bswa", "gptalpha", "kvm_sqrt", "kvm_swa", "ovq_swa", "rwkv7"]


def imported(source: Path, out: Path, dtype: str | None = None, shard_bytes: int = GIGABYTE) -> Path:
    import_published(source, out, dtype, None, shard_bytes, silent=True)
    return out


@pytest.mark.parametrize("name", FAMILIES)
def test_imported_folders_compute_the_authors_logits(name: str, tmp_path: Path) -> None:
    out = imported(GOLDEN / "checkpoints" / name, tmp_path / "out")
    vectors = load_file(GOLDEN / f"model_{name}.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        logits = loaded(vectors["input_ids"]).logits
    assert (logits - vectors["logits"]).abs().max() <= 1e-5
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("dims", [0, 8], ids=["NoPE", "HalfRoPE"])
def test_full_attention_between_windows_comes_back_from_the_published_layout(
    dims: int, tmp_path: Path
) -> None:
    layers = ["sliding_window", "full_attention"] * 2
    model = tiny_model(layers, full_attention={"rotary_dims": dims}, sliding_window={"window": 16})
    write_published(tmp_path / "theirs", content_of(model), GIGABYTE, silent=True)
    names = {name.split(".", 2)[2][2:] for name in read_tensors(tmp_path / "theirs") if ".h." in name}
    published = load_file(GOLDEN / "checkpoints/gptalpha/model.safetensors")
    assert names == {name.split(".", 2)[2][2:] for name in published if ".h." in name}

    opened = open_pretrained(imported(tmp_path / "theirs", tmp_path / "ours"))
    ids, _ = tiny_batch(40)
    assert torch.equal(logits_of(opened.model, ids), logits_of(model, ids))


def test_shards_and_their_index_are_read_and_written(tmp_path: Path) -> None:
    whole = imported(published_copy(tmp_path / "whole"), tmp_path / "one")
    source = published_copy(tmp_path / "split")
    split_in_two(source)
    out = imported(source, tmp_path / "many", shard_bytes=60_000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    places = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert all(name in load_file(out / file) for name, file in places.items())
    assert same(read_tensors(out), read_tensors(whole))
    assert same(dict(AutoModelForCausalLM.from_pretrained(out).state_dict()), read_tensors(whole))


def test_the_dtype_stays_unless_another_is_wanted(tmp_path: Path) -> None:
    source = published_copy(tmp_path / "source")
    halves = {name: z.bfloat16() for name, z in read_tensors(source).items()}
    replace_tensors(source, halves)
    out = imported(source, tmp_path / "as-is")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert open_pretrained(out).model.embedding.weight.dtype == torch.bfloat16
    wide = read_tensors(imported(source, tmp_path / "wide", "float32"))
    assert same({name: z.bfloat16() for name, z in wide.items()}, read_tensors(out))
    assert {z.dtype for z in wide.values()} == {torch.float32}


def test_weights_in_float16_are_read_exactly_into_float32(tmp_path: Path) -> None:
    source = published_copy(tmp_path / "source")
    halves = {name: z.half() for name, z in read_tensors(source).items()}
    replace_tensors(source, halves)
    out = imported(source, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    names = name_map(open_pretrained(out).config.model)
    found = read_tensors(out)
    assert len(found) == len(halves)
    for name, z in halves.items():
        assert torch.equal(found[f"backbone.{names[name]}"].view_as(z), z.float()), name
    AutoModelForCausalLM.from_pretrained(out, dtype=torch.float16).save_pretrained(tmp_path / "half")
    assert read_tensors(tmp_path / "half")["backbone.head.weight"].dtype == torch.float16
    assert same(
        dict(open_pretrained(tmp_path / "half").model.state_dict()),
        dict(open_pretrained(out).model.state_dict()),
    )


def test_weights_that_the_settings_switch_off_are_left_out_with_a_note(tmp_path: Path) -> None:
    source = published_copy(tmp_path / "source", kvm_use_head_temps=0, use_l2wrap=True)
    notes = import_published(source, tmp_path / "out", None, None, GIGABYTE, silent=True).notes
    assert "use_l2wrap is on" in notes[0]
    assert "transformer.h.1.attn.front_head_temp is left out" in " ".join(notes)


def spoil_weights(source: Path, kind: str) -> None:
    tensors, name = read_tensors(source), "transformer.h.1.attn.c_q.weight"
    if kind == "missing":
        del tensors[name]
    elif kind == "extra":
        tensors["transformer.h.0.attn.key_weighting.weight"] = torch.ones(2, 32)  # layer 0 is a window
    elif kind == "shape":
        tensors[name] = tensors[name][:16].clone()
    elif kind == "flat":
        tensors["transformer.h.0.mlp.x_k"] = tensors["transformer.h.0.mlp.x_k"].flatten()
    elif kind == "infinite":
        tensors[name][3, 5] = torch.inf
    elif kind == "nan":
        tensors["lm_head.weight"][0, 0] = torch.nan
    elif kind == "double":
        tensors[name] = tensors[name].double()
    elif kind == "mixed":
        tensors[name] = tensors[name].bfloat16()
    replace_tensors(source, tensors)


WRONG_WEIGHTS = {
    "missing": "transformer.h.1.attn.c_q.weight is missing",
    "extra": "transformer.h.0.attn.key_weighting.weight has no place in this model",
    "shape": r"transformer.h.1.attn.c_q.weight has shape \[16, 32\], wanted \[32, 32\]",
    "flat": r"transformer.h.0.mlp.x_k has shape \[32\], wanted \[1, 1, 32\]",
    "infinite": "layers.1.mixer.projections.query.weight holds values that are not finite",
    "nan": "head.weight holds values that are not finite",
    "double": "transformer.h.1.attn.c_q.weight is stored as F64, wanted F32 or BF16 or F16",
    "mixed": "transformer.h.1.attn.c_q.weight.*--dtype",
}


def assert_nothing_left(folder: Path, *expected: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(expected)


@pytest.mark.parametrize("kind", WRONG_WEIGHTS)
def test_weights_that_do_not_fit_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    source = published_copy(tmp_path / "source")
    spoil_weights(source, kind)
    with pytest.raises(DataError, match=WRONG_WEIGHTS[kind]):
        imported(source, tmp_path / "out")
    assert_nothing_left(tmp_path, "source")


def damage(source: Path, kind: str) -> None:
    weights, config = source / "model.safetensors", source / "config.json"
    content = weights.read_bytes()
    if kind == "cut short":
        weights.write_bytes(content[:-100])
    elif kind == "cut in the header":
        weights.write_bytes(content[:50])
    elif kind == "empty":
        weights.write_bytes(b"")
    elif kind == "longer":
        weights.write_bytes(content + b"more")
    elif kind == "header of noise":
        weights.write_bytes(content[:8] + bytes(byte ^ 0x55 for byte in content[8:400]) + content[400:])
    elif kind == "no weights":
        weights.rename(source / "pytorch_model.bin")
    elif kind == "two sets of weights":
        write_index(source, {"a": "model.safetensors"})
    elif kind == "config cut short":
        config.write_text(config.read_text()[:-20])
    elif kind == "no config":
        config.unlink()
    elif kind == "config says a thing twice":
        config.write_text('{"chunk_len": 8, ' + config.read_text().lstrip("{"))
    elif kind == "config with NaN":
        config.write_text(config.read_text().replace("10000.0", "NaN"))
    elif kind == "config is a list":
        config.write_text("[]")


DAMAGES = {
    "cut short": "model.safetensors: damaged or cut off",
    "cut in the header": "model.safetensors: damaged or cut off",
    "empty": "model.safetensors: damaged or cut off",
    "longer": "model.safetensors: damaged or cut off",
    "header of noise": "model.safetensors: damaged or cut off",
    "no weights": "holds neither model.safetensors nor",
    "two sets of weights": "holds both model.safetensors and",
    "config cut short": "config.json: unreadable or damaged",
    "no config": "no config.json there",
    "config says a thing twice": "chunk_len stands there twice",
    "config with NaN": "NaN is no number",
    "config is a list": "holds no JSON object",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_folders_end_with_a_storage_error(kind: str, tmp_path: Path) -> None:
    source = published_copy(tmp_path / "source")
    damage(source, kind)
    with pytest.raises(StorageError, match=DAMAGES[kind]):
        imported(source, tmp_path / "out")
    assert_nothing_left(tmp_path, "source")


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("lm_head.weight", "absent.safetensors", "names absent.safetensors, which is missing"),
        ("lm_head.weight", "part-0.safetensors", "which .* places in part-0"),
        ("lm_head.weight", "../part-1.safetensors", "which is no safetensors file of this folder"),
        (
            "unheard.of",
            "part-0.safetensors",
            "places unheard.of in part-0.safetensors, which does not hold it",
        ),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(
    name: str, file: str, message: str, tmp_path: Path
) -> None:
    source = published_copy(tmp_path / "source")
    split_in_two(source)
    index = source / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    if places.get(name) == file:
        file = "part-1.safetensors"
        message = message.replace("part-0", "part-1")
    write_index(source, places | {name: file})
    with pytest.raises(StorageError, match=message):
        imported(source, tmp_path / "out")
    assert_nothing_left(tmp_path, "source")


def test_settings_that_cannot_be_followed_leave_nothing(tmp_path: Path) -> None:
    source = published_copy(tmp_path / "source", logit_softcap=30.0)
    with pytest.raises(ConfigError, match=r"logit_softcap=30\.0"):
        imported(source, tmp_path / "out")
    assert_nothing_left(tmp_path, "source")


def test_a_place_that_is_taken_is_refused_and_untouched(tmp_path: Path) -> None:
    source = published_copy(tmp_path / "source")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        imported(source, tmp_path / "full")
    with pytest.raises(ConfigError, match="is no folder"):
        imported(source, tmp_path / "full/mine.txt")
    assert (tmp_path / "full/mine.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert (imported(source, tmp_path / "empty") / "config.json").is_file()
    with pytest.raises(ConfigError, match="in our layout already"):
        imported(tmp_path / "empty", tmp_path / "again")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_whatever_ends_the_writing_leaves_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    source = published_copy(tmp_path / "source")
    monkeypatch.setattr(kvm_dist.convert.weights, "write_durably", fail)
    with pytest.raises(StorageError if isinstance(error, OSError) else KeyboardInterrupt):
        imported(source, tmp_path / "out")
    assert_nothing_left(tmp_path, "source")


def test_a_disk_without_room_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(StorageError, match="have 1,000; make room"):
        imported(published_copy(tmp_path / "source"), tmp_path / "out")
    assert_nothing_left(tmp_path, "source")


def test_a_folder_without_tokenizer_says_so_when_text_is_asked_for(tmp_path: Path) -> None:
    opened = open_pretrained(imported(published_copy(tmp_path / "source"), tmp_path / "out"))
    assert opened.tokenizer.vocab_size == 61
    with pytest.raises(ConfigError, match="has no tokenizer"):
        opened.tokenizer.encode("text")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="bytes has 256 ids, the model only 61"):
        import_published(published_copy(tmp_path / "source"), tmp_path / "out", None, "bytes", GIGABYTE, True)
    assert_nothing_left(tmp_path, "source")
