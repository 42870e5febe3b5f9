"""What the tests of the fault table have seen, as text, Markdown and JSON."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import ROWS, Row


@dataclass
class Ended:
    """How a test ended, all its parameters together; seen: what it recorded with `record_property`."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seen: list[str] = field(default_factory=list)


class FaultReport:
    """Rows are complete when all their tests ran and passed."""

    def __init__(self) -> None:
        self._ended: dict[str, Ended] = {}
        self._tests = {test for row in ROWS for test in row.tests}

    @property
    def touched(self) -> bool:
        """Whether a test of the table was among those that ran."""
        return bool(self._ended)

    def add(self, node: str, when: str | None, outcome: str, seen: list[str]) -> None:
        """A phase (setup, call, teardown) of a test."""
        test = node.partition("[")[0]  # without parameters
        if test not in self._tests:
            return
        ended = self._ended.setdefault(test, Ended())
        if outcome == "failed":
            ended.failed += 1
        elif outcome == "skipped":
            ended.skipped += 1
        elif when == "call":
            ended.passed += 1
            ended.seen += seen

    def seen(self, row: Row) -> str:
        """In words."""
        found = [self._ended.get(test, Ended()) for test in row.tests]
        passed, failed, skipped = (
            sum(getattr(ended, name) for ended in found) for name in ("passed", "failed", "skipped")
        )
        absent = sum(test not in self._ended for test in row.tests)
        if not passed and not failed:
            return "left out" if skipped else "not run"
        parts = [f"FAILED: {failed} of {passed + failed} tests"] if failed else [f"as expected in {passed}"]
        parts += [f"{skipped} left out"] if skipped else []
        parts += [f"{absent} not run"] if absent else []
        return "; ".join([*parts, *dict.fromkeys(text for ended in found for text in ended.seen)])

    def text(self) -> str:
        """For a terminal: three lines for every row of which a test ran."""
        rows = [row for row in ROWS if any(test in self._ended for test in row.tests)]
        lines = [f"{row.fault}\n    expected  {row.expected}\n    seen      {self.seen(row)}" for row in rows]
        if len(rows) < len(ROWS):
            lines.append(f"{len(ROWS) - len(rows)} other faults were not tested")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """`path` with the suffixes .md and .json."""
        path.parent.mkdir(parents=True, exist_ok=True)
        cells = [[row.fault, row.expected, self.seen(row)] for row in ROWS]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in cells]
        table = "".join(["| fault | expected | seen |\n|---|---|---|\n", *lines])
        path.with_suffix(".md").write_text(table, encoding="utf-8")
        records = [
            {"fault": row.fault, "expected": row.expected, "seen": self.seen(row), "tests": row.tests}
            for row in ROWS
        ]
        path.with_suffix(".json").write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
