"""Kernels are compiled before the ranks of a run can wait for each other in a collective."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kvm_dist import run_parts, train
from kvm_dist.config import RunConfig
from kvm_dist.exit_codes import CrashError
from kvm_dist.run_parts import compile_kernels
from parallel.world import leave_world
from tests.models.tiny import HYBRID, tiny_config


def test_a_run_compiles_before_it_has_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[RunConfig, torch.device, bool]] = []
    monkeypatch.setattr(
        train,
        "compile_kernels",
        lambda config, device: called.append((config, device, dist.is_initialized())),
    )
    config = RunConfig(model=tiny_config(HYBRID), device="cpu")
    try:
        world = train._join(config)
    finally:
        leave_world()
    assert called == [(config, world.device, False)]


def test_a_run_wants_the_same_bits_before_it_has_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps groups made after that from NVLink SHARP, whose sums may differ from run to run."""
    wanted: list[bool] = []

    def nobody_is_there(config: RunConfig) -> None:
        wanted.append(torch.are_deterministic_algorithms_enabled())
        raise CrashError("nobody is there")

    monkeypatch.setattr(train, "_join", nobody_is_there)
    monkeypatch.setattr(train.StopRequest, "install", lambda self: self)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    loaded: Any = SimpleNamespace(config=RunConfig(model=tiny_config(HYBRID), device="cpu"))
    try:
        with pytest.raises(CrashError, match="nobody is there"):
            train.train(loaded)
    finally:
        torch.use_deterministic_algorithms(before)
    assert wanted == [True]


@pytest.mark.parametrize(("device", "kernels"), [("cuda:1", ["float32"]), ("cpu", [])])
def test_kernels_are_those_of_gpus_and_of_the_run_s_precision(
    monkeypatch: pytest.MonkeyPatch, device: str, kernels: list[str]
) -> None:
    called: list[str] = []
    monkeypatch.setattr(
        run_parts, "warm_up", lambda model, on, dtype, said: called.append(str(dtype).removeprefix("torch."))
    )
    compile_kernels(RunConfig(model=tiny_config(HYBRID)), torch.device(device))
    assert called == kernels
