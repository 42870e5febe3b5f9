"""Writes and reads Hugging Face folders of ours: config, weights, tokenizer, model card."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from kvm_dist.config import RunConfig
from kvm_dist.convert.content import ModelContent
from kvm_dist.convert.json_file import read_json_object, write_json
from kvm_dist.convert.new_folder import new_folder
from kvm_dist.convert.tokenizer_files import write_tokenizer
from kvm_dist.convert.weights import (
    SafetensorsFolder,
    one_dtype,
    parameter_shapes,
    require_finite,
    require_match,
    weight_layouts,
    write_weights,
)
from kvm_dist.exit_codes import ConfigError
from kvm_dist.load import load_values
from models.folder.card import model_card
from models.folder.config import (
    OWN_TOKENIZER,
    PREFIX,
    SpecialTokens,
    folder_config,
    generation_config,
    is_ours,
    require_agreement,
)

_TEXT_BYTES = 64 << 20  # room for a tokenizer's files


def write_folder(out: Path, content: ModelContent, shard_bytes: int, silent: bool = False) -> None:
    """A new folder `out` that `from_pretrained` loads."""
    shapes = {PREFIX + name: shape for name, shape in parameter_shapes(content.model).items()}
    layouts = weight_layouts(shapes, content.dtype, shard_bytes)
    with new_folder(out, sum(layout.size for layout in layouts) + _TEXT_BYTES) as folder:

        def tensor(name: str) -> Tensor:
            return content.tensor(name.removeprefix(PREFIX))

        write_weights(folder, layouts, tensor, f"writing {out.name}", silent)
        name = write_tokenizer(content.tokenizer, folder) if content.tokenizer else None
        values = folder_config(
            content.model, content.dtype_name, name, content.special, content.training_context
        )
        facts = {"training": content.facts.training, "evaluations": content.facts.evaluations}
        values |= {name: known for name, known in facts.items() if known}
        write_json(folder / "config.json", values)
        write_json(folder / "generation_config.json", generation_config(content.special))
        parameters = sum(prod(shape) for shape in shapes.values())
        card = model_card(content.model, parameters, content.dtype_name, name, content.facts)
        (folder / "README.md").write_text(card, encoding="utf-8")


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A folder of ours whose weights fit its config.

    special, training_context: what the folder says itself.  training, evaluations: what its card says.
    """

    path: Path
    config: RunConfig
    has_tokenizer: bool
    special: SpecialTokens
    training_context: int | None
    training: dict[str, str]
    evaluations: dict[str, str]
    weights: SafetensorsFolder

    @property
    def names(self) -> list[str]:
        """Of all parameters."""
        return [name.removeprefix(PREFIX) for name in self.weights.names]

    def tensor(self, name: str) -> Tensor:
        return require_finite(self.path, PREFIX + name, self.weights.tensor(PREFIX + name))


def open_folder(path: Path, overrides: Sequence[str] = (), dtype: str | None = None) -> HuggingFaceFolder:
    """With a run configuration made of defaults, the folder's model, dtype and tokenizer, and `overrides`.

    dtype: what its tensors, which may then be of several, are wanted in; None: in that of all of them.
    Raises ConfigError for a folder of another model or a configuration that is wrong, DataError for weights
    that do not fit, StorageError for damaged files.
    """
    settings = read_json_object(path / "config.json")
    if not is_ours(settings):
        raise ConfigError(
            f"{path}/config.json is of model_type={settings.get('model_type')!r}, not one of ours; bring a "
            "checkpoint in the authors' layout into ours first: kvm-dist import DIR OUT"
        )
    weights = SafetensorsFolder(path)
    precision = dtype or str(one_dtype(weights)).removeprefix("torch.")
    values: dict[str, Any] = {"model": settings.get("model"), "parallel": {"precision": precision}}
    tokenizer, context = settings.get("tokenizer"), settings.get("training_context")
    data = {
        "tokenizer": str(path) if tokenizer == OWN_TOKENIZER else tokenizer,
        "sequence_length": context,
    }
    values["data"] = {name: value for name, value in data.items() if value is not None}
    config = load_values(values, f"{path}/config.json").config
    try:
        require_agreement(settings, config.model)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    config = load_values(values, f"{path}/config.json", overrides).config
    shapes = {PREFIX + name: shape for name, shape in parameter_shapes(config.model).items()}
    require_match(path, {name: weights.shape(name) for name in weights.names}, shapes)
    return HuggingFaceFolder(
        path,
        config,
        tokenizer is not None or any(text.startswith("data.tokenizer=") for text in overrides),
        SpecialTokens.of(settings),
        context,
        _card_facts(path, settings, "training"),
        _card_facts(path, settings, "evaluations"),
        weights,
    )


def _card_facts(path: Path, settings: Mapping[str, Any], name: str) -> dict[str, str]:
    facts = settings.get(name) or {}
    if not isinstance(facts, Mapping) or not all(isinstance(value, str) for value in facts.values()):
        raise ConfigError(
            f"{path}/config.json: {name}={facts!r}, wanted lines of text for the model card by their names; "
            "mend it or leave it out"
        )
    return dict(facts)
