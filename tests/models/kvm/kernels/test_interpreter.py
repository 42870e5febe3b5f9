"""Runs the tests of `interpreted/` where Triton was told to interpret kernels before it was imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))
SECONDS = 1200  # of a file on a machine with much other work


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("name", FILES)
def test_kernels_pass_in_the_interpreter(name: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    command += [f"--timeout={SECONDS}", str(FOLDER / name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_there_are_tests_to_run() -> None:
    assert len(FILES) >= 5
