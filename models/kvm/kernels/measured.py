"""Rows that `kvm-dist bench kvm --tune` measured: files of this package, for all ranks the same."""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from models.kvm.kernels.tuning import KERNELS, TARGETS, Row, Tile

FOLDER = Path(__file__).parent / "measured_rows"  # one file a target


@dataclass(frozen=True)
class MeasuredRow:
    """A row and where it comes from."""

    row: Row
    seconds: float  # of the kernel's launches in one step, with this row
    default_seconds: float  # with the row it replaces
    device: str
    triton: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@cache
def measured_rows() -> tuple[Row, ...]:
    """All rows of this package's files, read once."""
    return tuple(one.row for path in sorted(FOLDER.glob("*.json")) for one in read_rows(path))


def read_rows(path: Path) -> list[MeasuredRow]:
    """The rows of one file. Raises ValueError, naming the file, if it holds anything else."""
    try:
        return [_parsed(one) for one in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path}: {error}: want rows as `kvm-dist bench kvm --tune` writes them; mend or remove the file"
        ) from error


def _parsed(one: dict[str, Any]) -> MeasuredRow:
    row = Row(**{**one["row"], "tile": Tile(**one["row"]["tile"])})
    if row.kernel not in KERNELS or row.chips not in TARGETS or not row.measured:
        raise ValueError(f"no measured row: {one['row']}")
    return MeasuredRow(**{**one, "row": row})


def write_rows(path: Path, rows: list[MeasuredRow]) -> None:
    """Add rows to a file; a row replaces that of the same kernel and shape class."""
    before = read_rows(path) if path.exists() else []
    kept = {_place(one.row): one for one in [*before, *rows]}
    text = json.dumps([kept[place].as_json() for place in sorted(kept)], indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


def _place(row: Row) -> tuple[str, str, int, int]:
    return row.kernel, row.chips, row.widest, row.element_bytes
