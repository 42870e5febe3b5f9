"""JSON files, read strictly: others wrote them. Imports no torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from kvm_dist.exit_codes import StorageError

_LARGEST = 64 << 20


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises StorageError if it is missing, damaged, or says one thing twice."""
    if not path.is_file():
        raise StorageError(f"{path}: no such file")
    try:
        if path.stat().st_size > _LARGEST:
            raise StorageError(f"{path}: larger than {_LARGEST} bytes")
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=_without_repetition, parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{path}: unreadable or damaged ({error})") from error
    if not isinstance(value, dict):
        raise StorageError(f"{path}: holds no JSON object")
    return value


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} stands there twice")
        found[name] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
