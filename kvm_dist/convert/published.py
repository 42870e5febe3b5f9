"""Reads and writes the authors' published layout: their names, shapes and settings."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kvm_dist.convert.content import ModelContent
from kvm_dist.convert.json_file import read_json_object, write_json
from kvm_dist.convert.new_folder import new_folder
from kvm_dist.convert.weights import (
    SafetensorsFolder,
    parameter_shapes,
    require_match,
    weight_layouts,
    write_weights,
)
from kvm_dist.data.tokenizer import HuggingFaceTokenizer
from kvm_dist.exit_codes import ConfigError, StorageError
from models.config import ModelConfig
from models.folder.config import is_ours
from models.published.names import name_map, published_shape
from models.published.settings import ignored_settings, model_config
from models.published.settings_written import published_settings

_TEXT_BYTES = 64 << 20  # room for a tokenizer's files


@dataclass(frozen=True)
class Published:
    """A published checkpoint whose names, shapes and dtypes fit its settings."""

    folder: Path
    settings: Mapping[str, Any]
    model: ModelConfig
    weights: SafetensorsFolder
    names: Mapping[str, str]  # our name -> theirs, of every parameter of the model
    notes: tuple[str, ...]

    def tensor(self, name: str) -> Tensor:
        """Our parameter `name`, in our shape and their dtype."""
        tensor = self.weights.tensor(self.names[name])
        return tensor.flatten() if tensor.shape[:2] == (1, 1) else tensor


def open_published(folder: Path) -> Published:
    """Reads the settings and compares names and shapes; no tensor is read.

    Raises ConfigError for settings that cannot be followed, DataError for weights that do not fit them,
    StorageError for missing or damaged files.
    """
    settings = _settings(folder)
    try:
        model = model_config(settings)
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}") from error
    weights = SafetensorsFolder(folder)
    places, shapes = name_map(model), parameter_shapes(model)
    names = {ours: theirs for theirs, ours in places.items() if ours in shapes}
    switched_off = [name for name in weights.names if name in places and places[name] not in shapes]
    wanted = {theirs: published_shape(theirs, shapes[ours], model) for ours, theirs in names.items()}
    require_match(
        folder, {name: weights.shape(name) for name in weights.names if name not in switched_off}, wanted
    )
    for name in names.values():
        weights.dtype(name)
    notes = [
        f"{name} is on; it acts in training only and is not followed" for name in ignored_settings(settings)
    ]
    notes += [f"{name} is left out: the settings switch it off" for name in switched_off]
    return Published(folder, settings, model, weights, names, tuple(notes))


def write_published(
    out: Path, content: ModelContent, shard_bytes: int, silent: bool = False
) -> tuple[str, ...]:
    """A new folder `out` that the authors' code loads; notes on what the layout has no place for.

    Raises ConfigError for a model that the layout cannot express.
    """
    model = content.model
    try:
        settings = published_settings(model, content.dtype_name) | content.special.ids()
        places = name_map(model)
    except ValueError as error:
        raise ConfigError(f"{error}; export it in our own layout, without --layout authors") from error
    shapes = parameter_shapes(model)
    ours = {theirs: name for theirs, name in places.items() if name in shapes}
    if lost := shapes.keys() - ours.values():
        raise ConfigError(f"the published layout has no place for {sorted(lost)}")
    their_shapes = {theirs: published_shape(theirs, shapes[name], model) for theirs, name in ours.items()}
    layouts = weight_layouts(their_shapes, content.dtype, shard_bytes)

    def tensor(theirs: str) -> Tensor:
        return content.tensor(ours[theirs]).view(their_shapes[theirs])

    with new_folder(out, sum(layout.size for layout in layouts) + _TEXT_BYTES) as folder:
        write_weights(folder, layouts, tensor, f"writing {out.name}", silent)
        if isinstance(content.tokenizer, HuggingFaceTokenizer):
            content.tokenizer.save(folder)
        write_json(folder / "config.json", settings)
    return _tokenizer_note(content)


def _tokenizer_note(content: ModelContent) -> tuple[str, ...]:
    if content.tokenizer is None or isinstance(content.tokenizer, HuggingFaceTokenizer):
        return ()
    name = content.tokenizer.name
    return (f"the published layout has no place for the tokenizer {name}: import it with --tokenizer {name}",)


def _settings(folder: Path) -> dict[str, Any]:
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        raise StorageError(f"{folder}: cannot be read: Permission denied; ask its owner for permission")
    if not (folder / "config.json").is_file():
        raise StorageError(
            f"{folder}: no config.json there; give the folder of a published checkpoint, with its safetensors"
        )
    settings = read_json_object(folder / "config.json")
    if is_ours(settings):
        raise ConfigError(f"{folder} is in our layout already; sample, evaluate and export take it as it is")
    return settings
