"""The folder of one run: its layout, its lock, and the refusal of an edited configuration. No torch."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvm_dist.exit_codes import ConfigError, StorageError
from kvm_dist.load import LoadedConfig, dump_config, leaves, load_config
from kvm_dist.run_lock import hold_lock
from models.config import ModelConfig

MODE = 0o750

# What a run's result depends on. The rest is layout, reporting or place, and may change on a resume.
RESULT_KEYS = (
    "model",
    "data.tokenizer",
    "data.sequence_length",
    "data.shuffle_tokens",
    "data.validation_fraction",
    "optimizer",
    "schedule",
    "seed",
    "train.steps",
    "train.batch_sequences",
    "train.start_from",
    "parallel.precision",
    "parallel.truncate_gradients",
)
# How every layer kind that has a choice of backends is computed, not what.
BACKEND_KEYS = tuple(f"model.{kind}.backend" for kind in ModelConfig.kinds_with_backends())
FREE_KEYS = ("model.activation_checkpointing", *BACKEND_KEYS)  # exceptions among them


@dataclass(frozen=True)
class RunDirectory:
    """Names of what a run leaves behind; touching none of it."""

    path: Path

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def samples_path(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def position_loss_path(self) -> Path:
        return self.path / "position_loss.json"

    @property
    def origin_path(self) -> Path:
        """What the run started from, where that was another model."""
        return self.path / "started_from.json"

    @property
    def dropped_path(self) -> Path:
        """What the batches were cut from that were not finite, or whose loss was a spike."""
        return self.path / "dropped_batches.jsonl"

    @property
    def postmortem_path(self) -> Path:
        return self.path / "postmortem.json"

    @property
    def attempts_path(self) -> Path:
        return self.path / "attempts.jsonl"

    @property
    def heartbeats(self) -> Path:
        return self.path / "heartbeats"

    @property
    def stacks(self) -> Path:
        return self.path / "stacks"

    @property
    def mlflow_run_id_path(self) -> Path:
        return self.path / "mlflow_run_id"

    @property
    def lock_path(self) -> Path:
        return self.path / "lock"

    def log_path(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"


def open_run_directory(loaded: LoadedConfig) -> RunDirectory:
    """Create the folder, or check that the one there belongs to this configuration, and write `config.yaml`.

    Any rank may call it; it takes no lock. Raises ConfigError if a key that changes the result was edited
    after a step was taken, StorageError if the folder cannot be written.
    """
    directory = _create(loaded)
    _compare(loaded, directory)
    _write_config(loaded, directory)
    return directory


@contextmanager
def locked_run_directory(loaded: LoadedConfig) -> Iterator[RunDirectory]:
    """`open_run_directory` under the lock that keeps a second launch out: for whoever starts a run."""
    directory = _create(loaded)
    with ExitStack() as stack:
        with _storage_errors(directory.path):
            stack.enter_context(hold_lock(directory.lock_path))
        yield open_run_directory(loaded)


def _create(loaded: LoadedConfig) -> RunDirectory:
    config = loaded.config
    directory = RunDirectory(config.run_directory)
    with _storage_errors(directory.path):
        config.run_root.mkdir(parents=True, exist_ok=True)
        for folder in (directory.path, directory.checkpoints, directory.logs, directory.plots):
            if not folder.is_dir():
                folder.mkdir(MODE, exist_ok=True)
                folder.chmod(MODE)  # whatever the umask says
    return directory


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the run directory {path} cannot be written: {error.strerror or error} "
            f"({error.filename or path}); make room or permissions, or choose another place: run_root=PATH"
        ) from error


def _write_config(loaded: LoadedConfig, directory: RunDirectory) -> None:
    """Also when nothing changed: it shows that the folder can be written before a step is paid for."""
    temporary = directory.path / f".config.yaml.{os.getpid()}"
    with _storage_errors(directory.path):
        temporary.write_text(dump_config(loaded.config), encoding="utf-8")
        temporary.replace(directory.config_path)


def _compare(loaded: LoadedConfig, directory: RunDirectory) -> None:
    if not directory.config_path.exists() or not _has_results(directory):
        return
    before = leaves(load_config(directory.config_path).config.model_dump(mode="json"))
    now = leaves(loaded.config.model_dump(mode="json"))
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    refused = [key for key in changed if _changes_result(key)]
    if refused:
        lines = [
            f"  {key}: {_shown(before.get(key))} -> {_shown(now.get(key))} "
            f"({loaded.provenance.get(key, 'gone')})"
            for key in refused
        ]
        raise ConfigError(
            f"{directory.path} holds a run with another configuration ({directory.config_path}); these keys "
            "change its result:\n" + "\n".join(lines) + "\ntake them back to go on with that run, or start "
            f"another one with name=OTHER (now name={loaded.config.name})"
        )


def _has_results(directory: RunDirectory) -> bool:
    """Whether there is anything that an edit could contradict: a first start that failed left nothing."""
    return directory.metrics_path.exists() or any(directory.checkpoints.iterdir())


def _changes_result(key: str) -> bool:
    def within(section: str) -> bool:
        return key == section or key.startswith(section + ".")

    return any(map(within, RESULT_KEYS)) and not any(map(within, FREE_KEYS))


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)
