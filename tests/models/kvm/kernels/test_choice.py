"""Which backend "auto" takes, and that nothing but the kernels imports Triton for it."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.kvm import FixedBudget
from models.kvm.backends import choose_backend
from models.kvm.layout import KVMSettings
from parallel.sequence.context import NoExchange


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "width", "chunk", "wanted"),
    [
        (True, torch.bfloat16, 128, 256, "triton"),
        (True, torch.float32, 256, 512, "triton"),
        (True, torch.float64, 128, 256, "torch"),
        (True, torch.bfloat16, 257, 256, "torch"),
        (True, torch.bfloat16, 128, 513, "torch"),
        (False, torch.bfloat16, 128, 256, "torch"),
    ],
)
def test_auto_takes_the_kernels_on_a_gpu_where_they_fit(
    is_cuda: bool, dtype: torch.dtype, width: int, chunk: int, wanted: str
) -> None:
    q: Any = SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(1, 8, 2, width))
    settings = KVMSettings(FixedBudget(slots=1024), chunk)
    assert choose_backend("auto", NoExchange(), q, settings) == wanted


def test_the_operator_and_the_tuning_rows_import_no_triton() -> None:
    check = "import sys, models.kvm, models.kvm.kernels.tuning, models.kvm.kernels.roofline as r; "
    check += "sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
