"""Kernels are compiled before the ranks of a run can wait for each other in a collective."""

import pytest
import torch
import torch.distributed as dist

from kvm_dist import run_parts, train
from kvm_dist.config import RunConfig
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
