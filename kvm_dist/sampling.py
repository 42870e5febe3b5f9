"""Text from a checkpoint on disk: the model, its tokenizer and its weights, without any engine."""

from pathlib import Path

import torch

from kvm_dist.checkpoint import newest_valid
from kvm_dist.checkpoint.load import LoadedCheckpoint, load_checkpoint
from kvm_dist.config import RunConfig
from kvm_dist.data.tokenizer import build_tokenizer
from kvm_dist.evaluate.session import continuation
from kvm_dist.exit_codes import ConfigError, StorageError
from kvm_dist.load import load_config
from models.backbone import Backbone


def sample(checkpoint: Path, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """What the model of `checkpoint` (its folder, or a run directory: the newest) writes after `prompt`.

    Raises StorageError if there is no valid checkpoint, ConfigError for an empty prompt.
    """
    if not prompt:
        raise ConfigError("--prompt is empty; give at least one character to go on from")
    loaded = load_checkpoint(_checkpoint_folder(checkpoint))
    config = load_config(loaded.path / "config.yaml").config
    tokenizer = build_tokenizer(config.data.tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu")
    model = load_model(loaded, config).to(device)
    generator = torch.Generator().manual_seed(seed)
    return prompt + continuation(model, tokenizer, prompt, tokens, temperature, generator, device)


def load_model(checkpoint: LoadedCheckpoint, config: RunConfig) -> Backbone:
    """The model of a checkpoint in the dtype of its forward, on the CPU."""
    model = Backbone(config.model).to(getattr(torch, config.parallel.precision))
    model.load_state_dict({name: checkpoint.tensor(name) for name in checkpoint.names})
    return model.eval()


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
