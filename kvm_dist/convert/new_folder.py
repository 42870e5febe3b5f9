"""A folder that appears whole or not at all. Imports no torch."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvm_dist.checkpoint.durable import sync_folder
from kvm_dist.exit_codes import ConfigError, StorageError


def require_free(out: Path) -> None:
    """Refuse a place where something is already, before any work is done."""
    try:
        if out.is_dir():
            if any(out.iterdir()):
                raise ConfigError(f"{out} exists and is not empty; give another folder, or empty this one")
        elif out.exists() or out.is_symlink():
            raise ConfigError(f"{out} exists and is no folder; give another path")
    except OSError as error:
        raise _not_written(out, error) from error


@contextmanager
def new_folder(out: Path, needed_bytes: int) -> Iterator[Path]:
    """A temporary folder beside `out`, renamed to it when the body ends well and removed otherwise.

    Raises ConfigError if `out` holds something, StorageError if the disk is full or cannot be written.
    """
    require_free(out)
    out = out.resolve()
    partial = out.with_name(f".{out.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        available = shutil.disk_usage(out.parent).free
        if available < needed_bytes:
            raise StorageError(
                f"not enough space for {out}: need {needed_bytes:,} bytes, have {available:,}; make room, or "
                "give another path"
            )
        partial.mkdir()
        yield partial
        sync_folder(partial)
        os.rename(partial, out)  # replaces an empty folder, nothing else
        sync_folder(out.parent)
    except OSError as error:
        raise _not_written(out, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _not_written(out: Path, error: OSError) -> StorageError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return StorageError(
            f"{out} cannot be written: a file stands where a folder is wanted; give another path"
        )
    reason = error.strerror or error
    return StorageError(f"{out} cannot be written: {reason}; make room or permissions, or give another path")
