"""Opens a checkpoint: verified first, then read lazily. No pickle on this path."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvm_dist.checkpoint.manifest import Manifest, check_presence, read_manifest, verify_checkpoint
from kvm_dist.exit_codes import StorageError


class LoadedCheckpoint:
    """A verified checkpoint whose tensors are read from disk when they are asked for."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.step = manifest.step
        self.state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
        self.config_text = (path / "config.yaml").read_text(encoding="utf-8")
        self._weights = _index(path, manifest, "model")
        self._optimizer = _index(path, manifest, "optimizer")
        self._rng = _index(path, manifest, "rng")
        found = len(self._weights) + len(self._optimizer) + len(self._rng)
        if found != manifest.tensor_count:
            raise StorageError(f"{path}: holds {found} tensors, the manifest says {manifest.tensor_count}")

    @property
    def names(self) -> list[str]:
        """Names of all parameters."""
        return list(self._weights)

    @property
    def ranks(self) -> int:
        """Number of ranks whose random state was saved."""
        return len({key.split(".", 1)[0] for key in self._rng})

    def has(self, name: str, kind: str) -> bool:
        """Whether a tensor is there; a master that equals the weight always is."""
        return name in self._weights if kind in ("weight", "master") else f"{kind}.{name}" in self._optimizer

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """A whole tensor on the CPU. `kind`: weight, master (the weight if of one dtype), exp_avg, ..."""
        key = f"{kind}.{name}"
        if kind != "weight" and key in self._optimizer:
            return self._read(self._optimizer[key], key)
        if kind in ("weight", "master") and name in self._weights:
            return self._read(self._weights[name], name)
        raise StorageError(f"{self.path}: holds no {kind} of parameter {name!r}; was the model changed?")

    def rng(self, rank: int) -> dict[str, Tensor] | None:
        """The random state of `rank`; None for a rank that did not exist at the save."""
        prefix = f"rank-{rank:05d}."
        keys = [key for key in self._rng if key.startswith(prefix)]
        return {key.removeprefix(prefix): self._read(self._rng[key], key) for key in keys} or None

    def _read(self, file: Any, key: str) -> Tensor:
        tensor: Tensor = file.get_tensor(key)
        return tensor


def load_checkpoint(path: Path, verify: bool = True) -> LoadedCheckpoint:
    """Checks every byte, then opens. `verify=False` checks names and sizes only: for ranks whose rank 0
    has verified this very folder (`newest_valid` or another rank's `load_checkpoint`).

    Raises StorageError (exit 74) naming the damaged file before anything could be applied.
    """
    if verify:
        manifest = verify_checkpoint(path)
    else:
        manifest = read_manifest(path)
        check_presence(path, manifest)
    try:
        return LoadedCheckpoint(path, manifest)
    except (OSError, ValueError, SafetensorError) as error:
        raise StorageError(f"{path}: cannot be opened ({error})") from error


def _index(path: Path, manifest: Manifest, stem: str) -> dict[str, Any]:
    """Tensor key -> open file, over all parts of one stem."""
    return {key: file for file in _open_parts(path, manifest, stem) for key in file.keys()}  # noqa: SIM118


def _open_parts(path: Path, manifest: Manifest, stem: str) -> Iterable[Any]:
    names = (f"{stem}.safetensors", f"{stem}-")
    for name in sorted(manifest.files):
        if name.startswith(names) and name.endswith(".safetensors"):
            yield safe_open(path / name, framework="pt", device="cpu")
