"""What a check of the machine found."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the report. fix: what to do, empty when nothing needs doing."""

    what: str
    level: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""
