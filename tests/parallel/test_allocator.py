import platform
import subprocess
import sys

import pytest

FAULTS_OF_NEW_TENSORS = """
import resource, sys, torch
from parallel.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def work():
    held = [torch.ones(size) for size in range(2**17, 2**20, 2**16)]
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_new_tensors_take_the_memory_of_freed_ones() -> None:
    faults = {}
    for mode in ("default", "keep"):
        command = [sys.executable, "-c", FAULTS_OF_NEW_TENSORS, mode]
        faults[mode] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert faults["default"] > 1_000  # given back each time
    assert faults["keep"] < faults["default"] / 2
