"""Folders that `save_pretrained` writes, loaded here and in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from models.hf import KVMDistForCausalLM
from tests.models.hf.faces import face
from tests.models.tiny import tiny_batch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    face("kvm/rwkv7").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", ["kvm_swa", "all kinds", "recurrences"])
def test_a_saved_model_comes_back_bit_for_bit(tmp_path: Path, family: str) -> None:
    model = face(family)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)

    assert isinstance(loaded, KVMDistForCausalLM)
    assert not loaded.training
    assert loaded.config.model == model.config.model
    for name, z in loaded.state_dict().items():
        assert torch.equal(z, model.state_dict()[name]), name
        assert z.dtype == torch.float32


def test_a_folder_says_what_other_programs_look_for(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())

    assert config["model_type"] == "kvm_dist"
    assert config["architectures"] == ["KVMDistForCausalLM"]
    assert config["dtype"] == "float32"
    assert (config["vocab_size"], config["hidden_size"]) == (37, 32)
    assert (config["num_hidden_layers"], config["num_attention_heads"]) == (2, 2)
    assert config["model"]["kvm"]["budget"]["factor"] == 3
    assert config["tie_word_embeddings"] is False
    assert all(name.startswith("backbone.") for name in load_file(folder / "model.safetensors"))


def test_weights_can_be_loaded_in_bfloat16(folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    expected = face("kvm/rwkv7").bfloat16().state_dict()

    assert all(torch.equal(z, expected[name]) for name, z in loaded.state_dict().items())
    text = loaded.generate(tiny_batch(20)[0], max_new_tokens=20)
    assert text.shape == (2, 40)


def test_a_model_can_be_loaded_without_a_cache(folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder, use_cache=False)
    assert loaded(tiny_batch(9)[0]).past_key_values is None
    loaded.save_pretrained(folder / "again")
    assert json.loads((folder / "again" / "config.json").read_text())["use_cache"] is False


def test_a_model_can_be_loaded_with_another_budget(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    config.model["kvm"]["budget"]["factor"] = 6.0
    wider = AutoModelForCausalLM.from_pretrained(folder, config=config)
    ids = tiny_batch(200)[0]
    with torch.no_grad():
        caches = [model(ids).past_key_values for model in (wider, face("kvm/rwkv7"))]

    assert caches[0].nbytes > caches[1].nbytes


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_weights_that_do_not_fit_are_refused_by_name(folder: Path, change: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "backbone.layers.1.mixer.bonus"
    if change == "unknown":
        name = "backbone.layers.1.mixer.extra"
    tensors[name] = torch.ones(3)
    if change == "missing":
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ValueError, match=f"do not fit the configuration: .*{name}"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_damaged_file_is_refused_with_the_folder_it_lies_in(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])

    with pytest.raises(
        OSError, match=rf"{folder}: a safetensors file is damaged or cut off \(.*copy the folder"
    ):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "config.json: model: wanted the settings of the layers by their names, got None"),
        ({"model": "x"}, "config.json: model: wanted the settings of the layers by their names, got 'x'"),
        ({"model": {"foo": 3}}, r"config.json: model.foo=3: Extra inputs .*export the model again"),
        ({"model": {"kvm": {"chunk": 0}}}, r"config.json: model.kvm.chunk=0: Input should be greater"),
        ({"model": {"layers": ["kvn"]}}, r"config.json: model.layers: unknown kind \['kvn'\]"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=true is not supported.*set it to false"),
        ({"hidden_size": 77}, "hidden_size=77 contradicts model.hidden_size=32"),
    ],
    ids=str,
)
def test_a_configuration_that_describes_no_model_is_refused_by_name(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))

    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


PROGRAM = """
import sys
import torch
import models.hf
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20)[0].tolist())
"""


def test_a_fresh_process_loads_a_folder_and_generates(folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=True
    )
    expected = face("kvm/rwkv7").generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20)

    assert json.loads(ended.stdout) == expected[0].tolist()
