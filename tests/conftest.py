"""The fault table at the end of a test run, and what several workers share out.

`--fault-report PATH` keeps the table: fault, expected, seen.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_report import FaultReport

REPORT_VARIABLE = "KVM_DIST_FAULT_REPORT"
# Before torch is imported: sums on several threads have other bits, and threads of all workers wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault-report",
        metavar="PATH",
        default=os.environ.get(REPORT_VARIABLE),
        help=f"write the fault table as PATH.md and PATH.json (default: ${REPORT_VARIABLE})",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FaultTable(config.getoption("--fault-report")), "fault-table")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays on one worker, with what its tests share; all files of Slurm do, there is one cluster."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "slurm" if Path(path).name.startswith("test_slurm") else path

    return ByFile(config, log)


class FaultTable:
    """Collects how the tests of the table ended."""

    def __init__(self, path: str | None) -> None:
        self.report = FaultReport()
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seen = [str(value) for name, value in report.user_properties if name == "seen"]
        self.report.add(report.nodeid, report.when, report.outcome, seen)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.report.touched:
            terminalreporter.section("faults: expected and seen")
            terminalreporter.write_line(self.report.text())
        if self.path:
            self.report.write(Path(self.path))
