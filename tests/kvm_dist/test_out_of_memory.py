"""A device whose memory is full ends a run with words that help."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvm_dist import train
from kvm_dist.config import RunConfig
from kvm_dist.exit_codes import CrashError
from kvm_dist.run_directory import RunDirectory
from parallel.world import World
from tests.models.tiny import HYBRID, tiny_config


def test_a_full_device_says_what_would_hold_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")

    monkeypatch.setattr(train.Mesh, "build", full)
    world = World(3, 8, 3, 8, 0, torch.device("cpu"), "gloo")
    given: Any = (RunConfig(model=tiny_config(HYBRID)), RunDirectory(tmp_path), world, lambda: False, None)
    with pytest.raises(CrashError, match="rank 3: CUDA out of memory") as told:
        train._train(*given)
    assert "Tried to allocate 2.00 GiB. What holds less: a higher train.accumulation" in str(told.value)
