"""Earlier results under the name that new ones get: kept if they answer another question. No torch."""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvm_dist.evaluate.results import Record, file_name, in_json
from kvm_dist.exit_codes import StorageError

_QUESTION = ("checkpoint", "overrides", "asked", "settings")  # of the same task: what results depend on


def keep_earlier(path: Path, record: Record) -> Path | None:
    """Rename what lies at `path` unless it answers what `record` answers, which may then take its place.

    Returns where it lies now: under the name, what it was asked with, and a hash of its question, so that
    there is one such file a question. Raises StorageError where it cannot be renamed.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}; give --out DIR") from error
    earlier = _record(content)
    question = _question(earlier)
    if question == _question(json.loads(in_json(record))):
        return None
    asked = earlier.get("asked") or []
    digest = sha256(question.encode() if earlier else content).hexdigest()[:8]
    kept = path.with_name(f"{file_name([path.stem, *map(str, asked), digest])}.json")
    try:
        path.replace(kept)
    except OSError as error:
        raise StorageError(f"{path} cannot be renamed: {error.strerror or error}; give --out DIR") from error
    return kept


def _record(content: bytes) -> Mapping[str, Any]:
    """Empty for a file that is no record."""
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _question(record: Mapping[str, Any]) -> str:
    return json.dumps([record.get(key) for key in _QUESTION], sort_keys=True)
