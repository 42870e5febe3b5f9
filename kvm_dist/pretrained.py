"""A trained model on disk, opened without any engine: a checkpoint, a run's newest one, or a folder for
Hugging Face that `import` or `export` wrote."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvm_dist.checkpoint import newest_valid
from kvm_dist.checkpoint.load import LoadedCheckpoint, load_checkpoint
from kvm_dist.config import RunConfig
from kvm_dist.convert.hugging_face import open_folder
from kvm_dist.data.tokenizer import Tokenizer, build_tokenizer
from kvm_dist.exit_codes import ConfigError, StorageError
from kvm_dist.load import load_config
from kvm_dist.model_folder import is_hugging_face, require_model_folder
from models.backbone import Backbone
from models.config import ModelConfig


@dataclass(frozen=True)
class Pretrained:
    """A model in the dtype of its forward, on its device and in evaluation mode, and what made it.

    step: 0 for a folder that does not come from a run's checkpoint.
    training_context: tokens of a sequence in training; None where nothing says so.
    """

    model: Backbone
    config: RunConfig
    tokenizer: Tokenizer
    device: torch.device
    step: int
    path: Path
    training_context: int | None = None

    @property
    def name(self) -> str:
        """That of the run, or of the folder."""
        return self.config.name if self.step else self.path.absolute().name


class Parameters(Protocol):
    """What is on disk: names, and tensors that are read when asked for."""

    @property
    def path(self) -> Path: ...

    @property
    def names(self) -> list[str]: ...

    def tensor(self, name: str) -> Tensor: ...


class MissingTokenizer:
    """Stands for the tokenizer of a folder that has none: the model reads ids, and no text."""

    name = "none"
    separator_id = 0
    fingerprint = ""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder, self.vocab_size = folder, vocab_size

    def encode(self, text: bytes | str) -> np.ndarray:
        raise self._error()

    def decode(self, ids: Iterable[int]) -> str:
        raise self._error()

    def text_bytes(self, ids: np.ndarray, begins: bool) -> int:
        raise self._error()

    def _error(self) -> ConfigError:
        return ConfigError(
            f"{self.folder} has no tokenizer, so it reads no text; import it again with --tokenizer, or give "
            "data.tokenizer=NAME"
        )


class LargerTokenizer:
    """A tokenizer with more ids than its model has: texts that need only those it has can be read."""

    def __init__(self, whole: Tokenizer, ids: int) -> None:
        self.name, self.separator_id, self.fingerprint = whole.name, whole.separator_id, whole.fingerprint
        self.vocab_size = whole.vocab_size
        self._whole, self._ids = whole, ids

    def encode(self, text: bytes | str) -> np.ndarray:
        ids = self._whole.encode(text)
        if ids.size and int(ids.max()) >= self._ids:
            raise ConfigError(
                f"tokenizer {self.name} gives this text the id {int(ids.max())}, the model has {self._ids} "
                "ids; name the tokenizer that made its training data: data.tokenizer=NAME"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._whole.decode(ids)

    def text_bytes(self, ids: np.ndarray, begins: bool) -> int:
        return self._whole.text_bytes(ids, begins)


class _Masters:
    """A checkpoint's float32 masters in place of weights that may be rounded."""

    def __init__(self, checkpoint: LoadedCheckpoint) -> None:
        self.path, self.names, self._checkpoint = checkpoint.path, checkpoint.names, checkpoint

    def tensor(self, name: str) -> Tensor:
        return self._checkpoint.tensor(name, "master")


def open_pretrained(path: Path, overrides: Sequence[str] = ()) -> Pretrained:
    """The model at `path`: the folder of a checkpoint, a run directory, whose newest valid one is taken, or a
    Hugging Face folder of ours.

    `overrides` change its configuration, such as `model.kvm.budget.factor=32`. Raises StorageError if
    nothing valid is there, ConfigError or DataError for a folder that does not fit its config.
    """
    require_model_folder(path)
    if is_hugging_face(path):
        folder = open_folder(path, overrides)
        _require_effect(overrides, folder.config.model)
        vocabulary = folder.config.model.vocab_size
        tokenizer = (
            build_tokenizer(folder.config.data.tokenizer)
            if folder.has_tokenizer
            else MissingTokenizer(path, vocabulary)
        )
        return _pretrained(folder, folder.config, tokenizer, 0, folder.training_context)
    checkpoint = open_checkpoint(path)
    config = load_config(checkpoint.path / "config.yaml", overrides).config
    _require_effect(overrides, config.model)
    tokenizer = build_tokenizer(config.data.tokenizer)
    exact = config.parallel.precision == "float32"
    source = _Masters(checkpoint) if exact else checkpoint
    return _pretrained(source, config, tokenizer, checkpoint.step, config.data.sequence_length)


def _require_effect(overrides: Sequence[str], model: ModelConfig) -> None:
    """Refuse a change of layers that the model has none of: results would be called after it."""
    for text in overrides:
        key = text.partition("=")[0]
        section, _, rest = key.partition(".")
        kind = rest.partition(".")[0]
        if section == "model" and kind in set(model.known_kinds()) - set(model.layer_kinds):
            raise ConfigError(
                f"{key}: the model has no layer of kind {kind}, its layers are {model.layers}; leave it out"
            )


def open_checkpoint(path: Path) -> LoadedCheckpoint:
    """The checkpoint at `path`, or the newest valid one of the run there; tensors are read when asked for."""
    require_model_folder(path)
    return load_checkpoint(_checkpoint_folder(path))


def _pretrained(
    source: Parameters, config: RunConfig, tokenizer: Tokenizer, step: int, training_context: int | None
) -> Pretrained:
    if tokenizer.vocab_size > config.model.vocab_size:
        tokenizer = LargerTokenizer(tokenizer, config.model.vocab_size)
    device = torch.device("cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu")
    model = load_model(source, config).to(device)
    return Pretrained(model, config, tokenizer, device, step, source.path, training_context)


@torch.no_grad()
def load_model(source: Parameters, config: RunConfig) -> Backbone:
    """A model in the dtype of its forward, on the CPU."""
    model = Backbone(config.model).to(getattr(torch, config.parallel.precision))
    parameters = model.state_dict()
    if extra := sorted(set(source.names) - parameters.keys()):
        raise ConfigError(
            f"the model has no place for {_some(extra)}; take back what was changed of its configuration"
        )
    if lost := sorted(parameters.keys() - set(source.names)):
        raise ConfigError(
            f"{source.path} holds no {_some(lost)}; take back what was changed of the model's configuration"
        )
    for name, parameter in parameters.items():
        tensor = source.tensor(name)
        if tensor.shape != parameter.shape:
            raise ConfigError(
                f"{name} has shape {list(tensor.shape)}, the model wants {list(parameter.shape)}; take back "
                "what was changed of its configuration"
            )
        parameter.copy_(tensor)
    return model.eval()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _checkpoint_folder(path: Path) -> Path:
    folder = path / "checkpoints"
    if not folder.is_dir():
        return path
    newest = newest_valid(folder)
    if newest is None:
        raise StorageError(
            f"{path} has no checkpoint yet; wait for the first save, or give a checkpoint's folder"
        )
    return newest.path
