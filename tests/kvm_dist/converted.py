"""Folders for the tests of import and export: published ones, whole and damaged, and models in memory."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvm_dist.convert.content import ModelContent
from models.backbone import Backbone
from models.folder.card import CardFacts
from models.folder.config import SpecialTokens
from parallel.sequence.context import WholeSequence
from tests.models.golden import GOLDEN

GIGABYTE = 10**9


def published_copy(folder: Path, name: str = "kvm_swa", **changes: Any) -> Path:
    """A copy of a golden checkpoint with `changes` in its settings."""
    shutil.copytree(GOLDEN / "checkpoints" / name, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return folder


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, whatever the number of its files."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def replace_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


def split_in_two(folder: Path) -> None:
    """The same tensors in two files and an index."""
    tensors = read_tensors(folder)
    (folder / "model.safetensors").unlink()
    places = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for part in sorted(set(places.values())):
        save_file({name: z for name, z in tensors.items() if places[name] == part}, folder / part)
    write_index(folder, places)


def write_index(folder: Path, places: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def content_of(model: Backbone, dtype: torch.dtype = torch.float32) -> ModelContent:
    return ModelContent(
        Path("memory"),
        model.config,
        dtype,
        model.state_dict().__getitem__,
        None,
        SpecialTokens(),
        CardFacts("a model", "a test"),
    )


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return first.keys() == second.keys() and all(
        z.dtype == second[name].dtype and torch.equal(z, second[name]) for name, z in first.items()
    )


@torch.no_grad()
def logits_of(model: Backbone, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, WholeSequence())
    return logits
