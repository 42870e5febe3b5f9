"""What a folder that is given for a model has to be. Imports no torch."""

import os
from pathlib import Path

from kvm_dist.exit_codes import StorageError

CHECKPOINTS, MANIFEST, HUGGING_FACE = "checkpoints", "manifest.json", "config.json"
_WANTED = "give a run directory, the folder of one checkpoint, or an exported folder"


def require_model_folder(path: Path) -> None:
    """StorageError for what cannot be a model, such as a file, a folder of runs, or any other folder."""
    if not path.is_dir():
        run = Path("runs") / path
        meant = f"; did you mean {run}?" if not path.is_absolute() and run.is_dir() else ""
        what = "is no folder" if path.exists() else "no such folder"
        raise StorageError(f"{path}: {what}{meant}; {_WANTED}")
    if not os.access(path, os.R_OK | os.X_OK):
        raise StorageError(
            f"{path}: cannot be read: Permission denied; ask its owner for permission to read it"
        )
    if path.name == CHECKPOINTS and any(path.glob("step-*")):
        raise StorageError(
            f"{path} holds the checkpoints of a run; give the run, {path.parent}, for its newest one, or one "
            f"of them: kvm-dist checkpoint list {path.parent}"
        )
    named = path.name.startswith("step-")  # of a save, which may be damaged: what reads it says how
    if not named and not any((path / name).exists() for name in (CHECKPOINTS, MANIFEST, HUGGING_FACE)):
        raise StorageError(
            f"{path} holds no model: neither {CHECKPOINTS}/ as a run, nor {MANIFEST} as a checkpoint, nor "
            f"{HUGGING_FACE} as an exported folder does; {_WANTED}"
        )


def is_hugging_face(path: Path) -> bool:
    """Whether `path` has the `config.json` of some Hugging Face folder, ours or not."""
    return (path / HUGGING_FACE).is_file()
