"""Values of a published `config.json`, each of the type it must have."""

import math
from collections.abc import Mapping
from typing import Any, Final

Settings = Mapping[str, Any]
REQUIRED: Final = object()


class SettingsReader:
    """Reads by name and collects what is wrong, so that a person hears of everything at once.

    A value that is wrong is replaced by one of the right type; who reads must look at `problems` in the end.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.problems: list[str] = []

    def refuse(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def integer(self, name: str, least: int, default: object = REQUIRED) -> int:
        value = self._value(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        self._wrong(name, value, f"a whole number, {least} or more")
        return max(least, 1)

    def integer_or(self, name: str, absent: tuple[int, ...], fallback: int, default: int) -> int:
        """A whole number from 1 on; `fallback` for the values in `absent`."""
        value = self._value(name, default)
        if isinstance(value, int) and not isinstance(value, bool):
            if value in absent:
                return fallback
            if value >= 1:
                return value
        spelled = " or ".join(map(str, absent))
        self._wrong(name, value, f"a whole number, 1 or more, or {spelled} for {fallback}")
        return fallback

    def optional_integer(self, name: str) -> int | None:
        """A whole number from 1 on, or null."""
        return None if self.settings.get(name) is None else self.integer(name, 1)

    def positive(self, name: str, default: object = REQUIRED) -> float:
        value = self._value(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        self._wrong(name, value, "a number above 0")
        return 1.0

    def switch(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
            return bool(value)
        self._wrong(name, value, "0 or 1")
        return default

    def word(self, name: str, known: tuple[str, ...], default: object = REQUIRED) -> str:
        value = self._value(name, default)
        if isinstance(value, str) and value in known:
            return value
        self._wrong(name, value, f"one of {', '.join(known)}")
        return known[0]

    def _value(self, name: str, default: object) -> object:
        return self.settings.get(name, default)

    def _wrong(self, name: str, value: object, wanted: str) -> None:
        if value is REQUIRED:
            self.refuse(f"{name} is missing, wanted {wanted}")
        else:
            self.refuse(f"{name}={value!r} is not supported, wanted {wanted}")
