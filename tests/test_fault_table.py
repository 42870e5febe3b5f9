"""The table of faults names tests that exist, and tells what they have shown."""

import ast
import json
from pathlib import Path

import pytest

from tests.faults import ROWS, Row
from tests.support import fault_report
from tests.support.fault_report import FaultReport

ROOT = Path(__file__).parents[1]


def test_every_test_of_the_table_exists() -> None:
    names: dict[str, set[str]] = {}
    missing = []
    for test in (test for row in ROWS for test in row.tests):
        path, _, name = test.partition("::")
        if path not in names:
            tree = ast.parse((ROOT / path).read_text()) if (ROOT / path).exists() else ast.Module([], [])
            names[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if name not in names[path]:
            missing.append(test)
    assert missing == []


def test_a_row_is_as_expected_only_when_nothing_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (Row("a|b", "x", ("t.py::one", "t.py::two")), Row("c", "y", ("t.py::three",)))
    monkeypatch.setattr(fault_report, "ROWS", rows)
    report = FaultReport()
    assert not report.touched
    report.add("t.py::other", "call", "passed", [])
    assert not report.touched
    for phase in ("setup", "call", "teardown"):
        report.add("t.py::one[0]", phase, "passed", ["exit 70"])
    report.add("t.py::three", "setup", "skipped", [])
    assert report.seen(rows[0]) == "as expected in 1; 1 not run; exit 70"
    assert report.seen(rows[1]) == "left out"
    report.add("t.py::two", "call", "failed", [])
    assert report.seen(rows[0]) == "FAILED: 1 of 2 tests; exit 70"
    assert "seen      left out" in report.text()
    report.write(tmp_path / "new" / "faults")
    table = (tmp_path / "new/faults.md").read_text().splitlines()
    assert len(table) == 4
    assert table[2].startswith("| a\\|b | x | FAILED")
    assert json.loads((tmp_path / "new/faults.json").read_text())[0]["fault"] == "a|b"
