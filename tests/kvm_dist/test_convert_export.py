"""Checkpoints into folders for Hugging Face and into the published layout, and back, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import models.hf  # noqa: F401
from kvm_dist.config import DataConfig, RunConfig, TrackingConfig
from kvm_dist.convert.exporting import export_model
from kvm_dist.convert.importing import import_published
from kvm_dist.exit_codes import ConfigError, DataError, StorageError
from kvm_dist.load import dump_config
from kvm_dist.metrics import append_metrics
from kvm_dist.origin import Origin, note_origin
from kvm_dist.pretrained import open_pretrained
from kvm_dist.run_directory import RunDirectory
from kvm_dist.sampling import sample
from models.backbone import Backbone
from parallel.config import ParallelConfig
from tests.kvm_dist.checkpoint_samples import save_tensors
from tests.kvm_dist.converted import GIGABYTE, logits_of, published_copy, read_tensors, same
from tests.models.golden import GOLDEN
from tests.models.tiny import tiny_batch, tiny_model

FAMILIES = ["bswa", "gptalpha", "kvm_sqrt", "kvm_swa", "ovq_swa", "rwkv7"]
LAYERS = ["kvm", "rwkv7"]


def make_run(
    root: Path, layers: list[str] = LAYERS, precision: str = "float32", tokenizer: str = "bytes"
) -> tuple[Path, Backbone]:
    """A run directory with the checkpoint of step 30, and the model in float32."""
    model = tiny_model(layers, vocab_size=256)
    config = RunConfig(
        name="little",
        run_root=root / "runs",
        model=model.config,
        data=DataConfig(path=root / "secret/place/corpus", sequence_length=96, tokenizer=tokenizer),
        parallel=ParallelConfig(precision=precision),
        tracking=TrackingConfig(enabled=False),
    )
    directory = root / "runs/little"
    (directory / "checkpoints").mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        tensors[name] = tensor.to(getattr(torch, precision)).clone()
        if precision != "float32":
            tensors[f"master.{name}"] = tensor.clone()
    state = {"tokens": 123_456, "metrics": {}}
    save_tensors(directory / "checkpoints", 30, tensors, state=state, config_text=dump_config(config))
    for step, loss in ((10, 5.5), (20, 4.25), (40, 1.0)):
        append_metrics(directory / "metrics.jsonl", step, {"validation/loss": loss})
    return directory, model


def exported(
    source: Path,
    out: Path,
    layout: str = "huggingface",
    dtype: str | None = None,
    shard_bytes: int = GIGABYTE,
) -> Path:
    export_model(source, out, layout, dtype, shard_bytes, silent=True)  # type: ignore[arg-type]
    return out


def test_an_exported_run_loads_generates_and_names_its_tokenizer(tmp_path: Path) -> None:
    run, model = make_run(tmp_path)
    out = exported(run, tmp_path / "out")
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    ids, _ = tiny_batch(50)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, logits_of(model, ids))
    ids = tokenizer("some text", return_tensors="pt").input_ids
    text = tokenizer.decode(loaded.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)[0])
    assert text == sample(out, "some text", tokens=8, temperature=0.0, seed=0)
    assert text == sample(run, "some text", tokens=8, temperature=0.0, seed=0)
    assert (loaded.generation_config.eos_token_id, loaded.config.pad_token_id) == (0, 0)


def test_a_folder_opens_as_a_checkpoint_does(tmp_path: Path) -> None:
    run, model = make_run(tmp_path)
    opened = open_pretrained(exported(run, tmp_path / "out"), ["model.kvm.budget.factor=5", "device=cpu"])
    assert opened.config.model.kvm.budget.model_dump()["factor"] == 5
    assert opened.config.model.layers == model.config.layers
    assert opened.tokenizer.name == "bytes"
    assert not opened.model.training
    assert same(dict(opened.model.state_dict()), dict(model.state_dict()))
    with pytest.raises(ConfigError, match=r"model\.kvm\.windw: unknown key"):
        open_pretrained(tmp_path / "out", ["model.kvm.windw=5"])
    for place in (run, tmp_path / "out"):
        with pytest.raises(ConfigError, match=r"model\.ovq\.chunk: the model has no layer of kind ovq"):
            open_pretrained(place, ["model.ovq.chunk=8"])
    with pytest.raises(DataError, match=r"backbone\.layers\.0\.mixer\.gate\.weight has no place"):
        open_pretrained(tmp_path / "out", ["model.kvm.merge_gate=false"])


def test_a_folder_keeps_the_context_of_its_training(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path)
    assert open_pretrained(run).training_context == 96
    first = exported(run, tmp_path / "first")
    opened = open_pretrained(exported(first, tmp_path / "second"))
    assert (opened.training_context, opened.config.data.sequence_length) == (96, 96)
    assert opened.name == "second"
    AutoModelForCausalLM.from_pretrained(first).save_pretrained(tmp_path / "theirs")
    opened = open_pretrained(tmp_path / "theirs", ["data.sequence_length=64"])
    assert (opened.training_context, opened.config.data.sequence_length) == (96, 64)
    import_published(GOLDEN / "checkpoints/kvm_swa", tmp_path / "third", None, None, GIGABYTE, silent=True)
    assert open_pretrained(tmp_path / "third").training_context is None


def test_a_folder_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    path = exported(make_run(tmp_path)[0], tmp_path / "out") / "config.json"
    path.write_text(path.read_text().replace('"num_attention_heads": 2', '"num_attention_heads": 4'))
    with pytest.raises(ConfigError, match=r"num_attention_heads=4 contradicts model\.num_heads=2"):
        open_pretrained(tmp_path / "out")


def test_a_checkpoint_of_another_model_than_its_configuration_is_refused(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path)
    with pytest.raises(ConfigError, match=r"no place for layers\.0\.mixer\.gate\.weight;"):
        open_pretrained(run, ["model.kvm.merge_gate=false"])
    with pytest.raises(ConfigError, match=r"has shape \[128, 32\], the model wants \[64, 32\]"):
        open_pretrained(run, ["model.ffn_expansion=2"])


def test_a_run_in_bfloat16_gives_its_weights_or_its_masters(tmp_path: Path) -> None:
    run, model = make_run(tmp_path, precision="bfloat16")
    weights = {f"backbone.{name}": z for name, z in model.state_dict().items()}
    half = read_tensors(exported(run, tmp_path / "half"))
    assert same(half, {name: z.bfloat16() for name, z in weights.items()})
    assert same(read_tensors(exported(run, tmp_path / "whole", dtype="float32")), weights)
    opened = open_pretrained(tmp_path / "half")
    assert opened.config.parallel.precision == "bfloat16"
    assert opened.model.head.weight.dtype == torch.bfloat16


def test_shards_hold_at_most_what_is_asked_for(tmp_path: Path) -> None:
    run, model = make_run(tmp_path)
    out = exported(run, tmp_path / "out", shard_bytes=50_000)
    sizes = [sum(z.nbytes for z in load_file(path).values()) for path in out.glob("*.safetensors")]
    assert len(sizes) > 3
    assert max(sizes) <= 50_000
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert same(dict(loaded.backbone.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_checkpoint_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    theirs = GOLDEN / "checkpoints" / name
    ours = tmp_path / "ours"
    import_published(theirs, ours, None, None, GIGABYTE, silent=True)
    back = exported(ours, tmp_path / "back", "authors")
    assert same(read_tensors(back), read_tensors(theirs))
    again = tmp_path / "again"
    import_published(back, again, None, None, GIGABYTE, silent=True)
    for file in ("model.safetensors", "config.json", "generation_config.json"):
        assert (again / file).read_bytes() == (ours / file).read_bytes(), file


def test_a_run_comes_back_from_the_published_layout_bit_for_bit(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, layers=["sliding_window", "kvm"])
    ours = exported(run, tmp_path / "ours")
    theirs = exported(run, tmp_path / "theirs", "authors", shard_bytes=50_000)
    assert len(list(theirs.glob("*.safetensors"))) > 2
    import_published(theirs, tmp_path / "back", None, "bytes", GIGABYTE, silent=True)
    for file in ("model.safetensors", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (ours / file).read_bytes(), file


def test_the_note_says_how_the_tokenizer_is_named_at_the_import(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, layers=["kvm"])
    content = export_model(run, tmp_path / "theirs", "authors", None, GIGABYTE, silent=True)
    assert content.notes == (
        "the published layout has no place for the tokenizer bytes: import it with --tokenizer bytes",
    )


def test_a_model_that_the_published_layout_cannot_say_leaves_nothing(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, layers=["kvm", "rwkv7", "sliding_window"])
    with pytest.raises(ConfigError, match=r"model\.layers="):
        exported(run, tmp_path / "out", "authors")
    assert not (tmp_path / "out").exists()


def test_an_export_of_an_export_changes_the_dtype_and_keeps_what_the_card_knows(tmp_path: Path) -> None:
    run, model = make_run(tmp_path)
    out = exported(exported(run, tmp_path / "first"), tmp_path / "second", dtype="bfloat16")
    assert same(
        read_tensors(out), {f"backbone.{name}": z.bfloat16() for name, z in model.state_dict().items()}
    )
    assert "| tokens seen | 123,456 |" in (out / "README.md").read_text()


def test_a_hugging_face_tokenizer_goes_along(tmp_path: Path) -> None:
    tokenizer = exported(make_run(tmp_path)[0], tmp_path / "bytes")
    (tmp_path / "other").mkdir()
    run, _ = make_run(tmp_path / "other", layers=["kvm"], tokenizer=str(tokenizer))
    out = exported(run, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["tokenizer"] == "."
    for file in tokenizer.iterdir():
        file.unlink()
    assert open_pretrained(out).tokenizer.encode("ab").tolist() == [97, 98]
    theirs = exported(out, tmp_path / "theirs", "authors")
    import_published(theirs, tmp_path / "back", None, None, GIGABYTE, silent=True)
    assert open_pretrained(tmp_path / "back").tokenizer.encode("ab").tolist() == [97, 98]


def test_a_tokenizer_that_cannot_be_written_is_a_fault_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_run(tmp_path)

    def full(folder: Path) -> None:
        raise Exception("No space left on device (os error 28)")  # as the tokenizers library says it

    monkeypatch.setattr("kvm_dist.convert.tokenizer_files.write_byte_tokenizer", full)
    with pytest.raises(StorageError, match=r"files of tokenizer bytes cannot be written \(No space left"):
        exported(run, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_the_card_says_what_the_run_knows_and_leaves_the_licence_open(tmp_path: Path) -> None:
    run, model = make_run(tmp_path, layers=["kvm", "kvm", "sliding_window"])
    changes: dict[str, dict[str, object]] = {
        "this": {},
        "other": {"step": 20},
        "wider": {"overrides": ["model.kvm.sinks=2"]},
    }
    for name, change in changes.items():
        record = {"task": "perplexity", "step": 30, "overrides": [], "metrics": {f"of {name}": 2.34567}}
        (run / "evaluations").mkdir(exist_ok=True)
        (run / f"evaluations/{name}.json").write_text(json.dumps(record | change))
    origin = Origin(str(tmp_path / "secret/runs/other/checkpoints/step-00000050"), 50, 8 * "0123abcd")
    note_origin(origin, RunDirectory(run))
    card = (exported(run, tmp_path / "my-model") / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["tags"] == ["kvm-dist", "kvm", "sliding-window"]
    assert "license" not in head
    count = sum(p.numel() for p in model.parameters())
    for expected in (
        "# my-model",
        f"{count:,} parameters in float32, from step 30 of the run little",
        "| 0-1 | Key-Value Means |",
        "| 2 | sliding-window attention |",
        "3 x N^0.5 slots after N tokens, at least 16, a window of 32 tokens besides",
        "| 1,024 | 95 |",
        "| data | corpus |",
        "| tokens seen | 123,456 |",
        "| steps | 30 of 6,000 |",
        "| started from | step 50 of the run other, weights with SHA-256 0123abcd0123abcd... |",
        "| validation loss | 4.2500 nats a token (at step 20) |",
        "| perplexity: of this | 2.346 |",
        "AutoModelForCausalLM.from_pretrained",
    ):
        assert expected in card, expected
    assert "of other" not in card
    assert "of wider" not in card
    assert "secret" not in card, "a card is published, paths are not"


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="absent: no such folder; give a run directory"):
        exported(tmp_path / "absent", tmp_path / "out")
    source = published_copy(tmp_path / "theirs")
    with pytest.raises(ConfigError, match=r"model_type='rwkv7backbone'.*kvm-dist import DIR OUT"):
        exported(source, tmp_path / "out")
    with pytest.raises(ConfigError, match="kvm-dist import DIR OUT"):
        sample(source, "x", tokens=1, temperature=0.0, seed=0)
    run, _ = make_run(tmp_path)
    with pytest.raises(ConfigError, match="is not empty"):
        exported(run, source)
    weights = run / "checkpoints/step-00000030/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    with pytest.raises(StorageError, match=r"model\.safetensors: content was changed"):
        exported(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
