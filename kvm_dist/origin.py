"""What a run started from, noted in its directory: the path may be gone later. Imports no torch."""

import json
from dataclasses import asdict, dataclass

from kvm_dist.exit_codes import StorageError
from kvm_dist.run_directory import RunDirectory


@dataclass(frozen=True)
class Origin:
    """The folder that was opened, its step, and a hash of its weights in float32."""

    path: str
    step: int
    weights_sha256: str


def note_origin(origin: Origin, directory: RunDirectory) -> None:
    try:
        directory.origin_path.write_text(json.dumps(asdict(origin)) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{directory.origin_path} cannot be written: {error.strerror or error}") from error


def read_origin(directory: RunDirectory) -> Origin | None:
    """None for a run that started with new weights."""
    try:
        return Origin(**json.loads(directory.origin_path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None


def origin_tags(directory: RunDirectory) -> dict[str, str]:
    """For the tracking store."""
    origin = read_origin(directory)
    if origin is None:
        return {}
    return {f"kvm_dist.started_from.{key}": str(value) for key, value in asdict(origin).items()}
