"""`manifest.json`: what a complete checkpoint consists of, and the check of it. Imports no torch."""

import hashlib
import json
import re
import stat
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import Field, ValidationError

from kvm_dist.checkpoint.durable import FileEntry
from kvm_dist.exit_codes import StorageError
from parallel.config import FrozenConfig

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
_LARGEST_MANIFEST = 16 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HASH_THREADS = 8  # more than there may be cores: some wait for the disk while others are hashed


class Manifest(FrozenConfig):
    """Every file of a checkpoint with size and hash; `digest` covers the manifest itself."""

    format_version: int
    step: int = Field(ge=0)
    created: str
    tensor_count: int = Field(ge=0)
    files: dict[str, FileEntry]
    digest: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def sealed(self) -> "Manifest":
        return self.model_copy(update={"digest": self._content_digest()})

    @property
    def is_sealed(self) -> bool:
        return self.digest == self._content_digest()

    def text(self) -> str:
        """The one spelling of this manifest: a file that differs by a byte was changed."""
        return json.dumps(self.model_dump(), indent=2, sort_keys=True) + "\n"

    def _content_digest(self) -> str:
        content = json.dumps(self.model_dump(exclude={"digest"}), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint folder, itself checked; the files it names are not opened."""
    path = checkpoint / MANIFEST_NAME
    if not checkpoint.is_dir():
        raise StorageError(f"{checkpoint}: no such checkpoint folder")
    if not _is_regular(path):
        raise StorageError(f"{path}: missing; the save was never finished or the file was deleted")
    if path.stat().st_size > _LARGEST_MANIFEST:
        raise StorageError(f"{path}: larger than {_LARGEST_MANIFEST} bytes; this is no manifest of ours")
    try:
        text = path.read_text(encoding="utf-8")
        manifest = Manifest.model_validate(json.loads(text))
    except (OSError, ValueError, RecursionError, ValidationError) as error:
        raise StorageError(f"{path}: unreadable or damaged ({type(error).__name__})") from error
    if manifest.format_version != FORMAT_VERSION:
        raise StorageError(
            f"{path}: format version {manifest.format_version}, this program reads {FORMAT_VERSION}"
        )
    if not manifest.is_sealed or manifest.text() != text:
        raise StorageError(f"{path}: was changed after the save (its own digest does not match)")
    unsafe = [name for name in manifest.files if not _FILE_NAME.fullmatch(name) or name == MANIFEST_NAME]
    if unsafe:
        raise StorageError(
            f"{path}: names {unsafe[0]!r}, which is not a plain file name inside the checkpoint"
        )
    return manifest


def check_presence(checkpoint: Path, manifest: Manifest) -> None:
    """Names, kinds and sizes of all files: cheap, finds missing, truncated and extra files."""
    for name, entry in manifest.files.items():
        path = checkpoint / name
        if not _is_regular(path):
            raise StorageError(f"{path}: missing (or no regular file)")
        if path.stat().st_size != entry.size:
            raise StorageError(f"{path}: {path.stat().st_size} bytes, the manifest says {entry.size}")
    extra = sorted({path.name for path in checkpoint.iterdir()} - set(manifest.files) - {MANIFEST_NAME})
    if extra:
        raise StorageError(f"{checkpoint / extra[0]}: not in the manifest; remove it if you put it there")


def verify_checkpoint(path: Path) -> Manifest:
    """Reads and hashes every byte of a checkpoint.

    Raises StorageError (exit 74) naming the first file that is missing, truncated, changed or extra.
    """
    manifest = read_manifest(path)
    verify_files(path, manifest, manifest.files)
    return manifest


def verify_files(path: Path, manifest: Manifest, names: Collection[str]) -> None:
    """Names, kinds and sizes of all files, and every byte of those in `names`."""
    check_presence(path, manifest)
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        digests = pool.map(_sha256, (path / name for name in names))
        for name, digest in zip(names, digests, strict=True):
            if digest != manifest.files[name].sha256:
                raise StorageError(
                    f"{path / name}: content was changed (its sha256 differs from the manifest)"
                )


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror})") from error
