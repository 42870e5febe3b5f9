"""`bench kvm --device cuda` from its first line to its last, with kernels in the interpreter for a GPU."""

import itertools
import json
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvm_dist.bench import accelerator, one_layer
from kvm_dist.bench.accelerator import REPLAYED, Clock
from kvm_dist.bench.floors import PEAKS
from kvm_dist.bench.one_layer import Shape, check
from kvm_dist.bench.setting import FULL_ATTENTION
from kvm_dist.exit_codes import CrashError
from launch import accelerator_bench
from models.budget import FixedBudget, PowerLawBudget
from models.kvm import ops
from models.kvm.kernels.jit.read import read_kernel

LAYER = Shape(batch=1, heads=1, head_dim=16, chunk=8, dtype=torch.float16)
BUDGETS = {"KVM-256": FixedBudget(slots=8), "KVM 16*sqrt": PowerLawBudget(factor=3, minimum=8)}
TOKENS = 26


class Graph:
    """Stands in for a recorded graph."""

    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


@pytest.fixture
def as_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(device: torch.device) -> Clock:
        return Clock(device, repeats=1, most_repeats=1)

    def recording(graph: Graph) -> AbstractContextManager[None]:
        return nullcontext()

    for name, value in (("CUDAGraph", Graph), ("graph", recording), ("device", nullcontext)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(accelerator_bench, "gpu_of", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(accelerator_bench, "Shape", lambda: LAYER)
    monkeypatch.setattr(accelerator_bench, "check", partial(check, tokens=TOKENS))
    monkeypatch.setattr(ops, "choose_backend", lambda backend, *_: "triton" if backend == "auto" else backend)
    for name, value in (("Clock", once), ("can_replay", lambda _: True), ("GOAL_TOKENS", TOKENS)):
        monkeypatch.setattr(accelerator, name, value)
    monkeypatch.setattr(accelerator, "peak_of", lambda _: PEAKS["H200"])
    for module in (accelerator, one_layer):
        monkeypatch.setattr(module, "BUDGETS", BUDGETS)
    Graph.replays = 0


@pytest.mark.usefixtures("as_on_an_h200")
def test_the_bench_checks_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "speed.json"
    accelerator_bench.bench_accelerator("cuda", [TOKENS], False, path)
    found = json.loads(path.read_text())
    rows: list[dict[str, Any]] = found["rows"]
    methods = (FULL_ATTENTION, *BUDGETS)
    phases = ("prefill", "backward", "decode", REPLAYED)
    assert [(row["method"], row["phase"]) for row in rows] == [(m, p) for m in methods for p in phases]
    assert all(row["seconds"] > 0 and row["floor_seconds"] > 0 and row["ratio"] > 0 for row in rows)
    assert len(found["errors"]) == 2 * 6
    assert found["left_out"] == []
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert Graph.replays == 2 * len(methods) * LAYER.chunk, "a call to warm up, and one that counts"
    said = capsys.readouterr()
    assert "right on cpu" in said.err
    assert said.out.count("times faster at 32K: wanted") == 6


@pytest.mark.usefixtures("as_on_an_h200")
def test_what_was_measured_when_the_time_is_over_is_written_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock moves by a minute whenever it is looked at: only some measurements of a length fit."""
    path, minutes = tmp_path / "speed.json", itertools.count()
    accelerator_bench.bench_accelerator(
        "cuda", [TOKENS, 2 * TOKENS], False, path, lambda: 60.0 * next(minutes)
    )
    found = json.loads(path.read_text())
    assert [(row["method"], row["phase"]) for row in found["rows"]] == [
        (FULL_ATTENTION, "prefill"),
        (FULL_ATTENTION, "backward"),
        (FULL_ATTENTION, "decode"),
    ]
    assert f"{TOKENS} prefill KVM-256: the time is over" in found["left_out"]
    assert found["left_out"][-1] == f"{2 * TOKENS} tokens and more: the time is over"
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert "left out: " in capsys.readouterr().err


@pytest.mark.usefixtures("as_on_an_h200")
def test_nothing_is_measured_where_a_kernel_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose compiler is wrong about one kernel."""
    right = read_kernel.run

    def wrong(*arguments: Any, **more: Any) -> None:
        right(*arguments, **more)
        arguments[7].mul_(1.02)  # the output

    monkeypatch.setattr(read_kernel, "run", wrong)
    with pytest.raises(CrashError, match="nothing was measured"):
        accelerator_bench.bench_accelerator("cuda", [TOKENS], False, tmp_path / "speed.json")
    assert not list(tmp_path.iterdir())
