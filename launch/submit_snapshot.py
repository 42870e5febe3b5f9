"""The code that a job runs: a copy from the time it was submitted."""

import shutil
from pathlib import Path

PACKAGES = ("launch", "kvm_dist", "models", "parallel")
ROOT = Path(__file__).parents[1]


def copy_code(target: Path) -> None:
    """Copy this program's packages, without what Python compiled."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__", ".*"))
