"""The `checkpoints/` folder of a run: which saves exist, which is the newest good one. Imports no torch."""

import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvm_dist.checkpoint.durable import sync_folder
from kvm_dist.checkpoint.manifest import check_presence, read_manifest, verify_checkpoint
from kvm_dist.exit_codes import StorageError

_log = logging.getLogger(__name__)
# A folder that is being replaced is parked as `.replaced-*`; it stands in while its successor is missing.
_STEP_FOLDER = re.compile(r"step-(\d{8,})(\.replaced-[0-9a-f]+)?")
_PARTIAL_FOLDER = re.compile(r"step-\d{8,}\.partial-[0-9a-f]+")


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint folder. `valid` is None until every byte was hashed; `problem` says why it is not."""

    path: Path
    step: int
    bytes: int
    valid: bool | None = None
    problem: str = ""

    @property
    def complete(self) -> bool:
        """Manifest and sizes fit (bytes may still be damaged unless `valid`)."""
        return not self.problem


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def partial_folder(checkpoints: Path, step: int) -> Path:
    """A fresh name that never counts as a checkpoint."""
    return checkpoints / f"step-{step:08d}.partial-{uuid.uuid4().hex[:8]}"


def list_checkpoints(run_dir: Path, verify: bool = False) -> list[CheckpointInfo]:
    """Checkpoints of a run, oldest first; unfinished saves are not among them. `verify` hashes every byte."""
    return inspect_folder(run_dir / "checkpoints", verify)


def inspect_folder(checkpoints: Path, verify: bool = False) -> list[CheckpointInfo]:
    return [_inspect(path, step, verify) for path, step in _step_folders(checkpoints)]


def newest_valid(checkpoints: Path, log: Callable[[str], None] = _log.warning) -> CheckpointInfo | None:
    """The newest checkpoint of which every byte is as saved; None when there never was one.

    Says through `log` why newer ones are passed over. Raises StorageError (exit 74) when checkpoints exist
    and none is valid: a run never starts again at step 0 in silence. Called by rank 0 alone, for all ranks.
    """
    folders = _step_folders(checkpoints)
    problems = []
    for path, step in reversed(folders):
        info = _inspect(path, step, verify=True)
        if info.valid:
            return info
        problems.append(info.problem)
        log(f"checkpoint {path.name} is not usable: {info.problem}")
    if folders:
        raise StorageError(
            f"none of the {len(folders)} checkpoints in {checkpoints} is valid: {'; '.join(problems)}. "
            "Restore one from a backup, or move the folder away to start again at step 0"
        )
    return None


def prune(checkpoints: Path, keep: int, verified: Path | None = None) -> list[Path]:
    """Keeps the `keep` newest good checkpoints and removes older, damaged, abandoned and unfinished ones.

    `verified` is the save that was just read back; without it the newest valid one is looked for. It is never
    removed. What is newer than it is damaged or of an abandoned timeline (the run went back) and is removed,
    too, or the next resume would jump there. Trouble while deleting is logged, never raised.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    if verified is None:
        newest = newest_valid(checkpoints)
        verified = newest.path if newest else None
    if verified is None:
        return []
    found = inspect_folder(checkpoints)
    verified, step = next((info.path, info.step) for info in found if info.path.name == verified.name)
    older = [info.path for info in found if info.step < step and info.complete]
    kept = {verified, *older[max(0, len(older) - (keep - 1)) :]}
    gone = [path for path in _all_folders(checkpoints) if path not in kept]
    return [path for path in gone if _remove(path)]


def put_in_place(partial: Path, final: Path) -> None:
    """Renames a finished save to its final name; an older save of that step stays readable meanwhile."""
    if final.exists():
        parked = final.with_name(f"{final.name}.replaced-{uuid.uuid4().hex[:8]}")
        os.rename(final, parked)
        os.rename(partial, final)
    else:
        os.rename(partial, final)
    sync_folder(final.parent)


def _inspect(path: Path, step: int, verify: bool) -> CheckpointInfo:
    info = CheckpointInfo(path, step, 0)
    try:
        manifest = verify_checkpoint(path) if verify else read_manifest(path)
        check_presence(path, manifest)
        if manifest.step != step:
            raise StorageError(
                f"{path}: the manifest is of step {manifest.step}, the folder's name says {step}"
            )
    except (StorageError, OSError) as error:
        return replace(info, valid=False, problem=str(error))
    return replace(info, bytes=manifest.total_bytes, valid=True if verify else None)


def _step_folders(checkpoints: Path) -> list[tuple[Path, int]]:
    """Checkpoint folders by step; a parked one only while its successor is missing."""
    chosen: dict[int, Path] = {}
    for path in sorted(_all_folders(checkpoints), key=lambda path: len(path.name)):
        match = _STEP_FOLDER.fullmatch(path.name)
        if match:
            chosen.setdefault(int(match[1]), path)
    return [(chosen[step], step) for step in sorted(chosen)]


def _all_folders(checkpoints: Path) -> list[Path]:
    try:
        paths = sorted(checkpoints.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{checkpoints}: cannot be read ({error.strerror})") from error
    return [
        path
        for path in paths
        if (_STEP_FOLDER.fullmatch(path.name) or _PARTIAL_FOLDER.fullmatch(path.name)) and path.is_dir()
    ]


def _remove(path: Path) -> bool:
    """Under a partial name first, so that a kill in between leaves no half of a checkpoint behind."""
    doomed = path
    try:
        if not _PARTIAL_FOLDER.fullmatch(path.name):
            doomed = path.with_name(f"{path.name.split('.')[0]}.partial-{uuid.uuid4().hex[:8]}")
            os.rename(path, doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        _log.warning("cannot remove %s: %s", doomed, error)
        return False
    return True
