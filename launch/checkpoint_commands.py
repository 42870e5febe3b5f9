"""`checkpoint list` and `checkpoint verify`."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvm_dist.checkpoint import list_checkpoints, verify_checkpoint
from kvm_dist.exit_codes import StorageError
from kvm_dist.model_folder import CHECKPOINTS, require_model_folder


def print_checkpoints(run: Path) -> None:
    """One line a checkpoint, oldest first, with what is wrong where something is."""
    if not run.is_dir():
        raise StorageError(f"{run}: no such run directory; give a folder such as runs/quickstart")
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        print(f"{run}: no checkpoint yet")
        return
    table = Table("step", "size", "state", "folder")
    for info in checkpoints:
        state = "complete" if info.complete else info.problem
        table.add_row(str(info.step), f"{info.bytes / 1e6:,.1f} MB", state, str(info.path))
    Console(soft_wrap=True).print(table)


def verify(path: Path) -> None:
    """Every byte read and hashed; ends with exit code 74 naming the first file that differs."""
    require_model_folder(path)
    if (path / CHECKPOINTS).is_dir():
        raise StorageError(f"{path} is a run; give one of its checkpoints: kvm-dist checkpoint list {path}")
    manifest = verify_checkpoint(path)
    print(
        f"{path}: whole: step {manifest.step}, {len(manifest.files)} files, {manifest.tensor_count} tensors, "
        f"{manifest.total_bytes:,} bytes"
    )
