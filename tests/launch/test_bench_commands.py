"""`kvm-dist bench kvm`: its tables, its files, its refusals. Never how long anything takes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvm_dist.bench.setting import QUICK
from kvm_dist.exit_codes import ConfigError
from launch import bench_commands

TINY = replace(
    QUICK, lengths=(600, 1_100), heads=2, width=16, rotary_dims=8, decode_context=600, memory_length=600
)


@pytest.fixture
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.mark.usefixtures("wide_terminal")
def test_the_bench_prints_its_tables_and_writes_numbers_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_commands, "QUICK", TINY)
    path = tmp_path / "results" / "kvm.json"
    bench_commands.bench_kvm("cpu", [600], quick=True, threads=1, json_path=path)
    printed = capsys.readouterr()
    for words in (
        "600",
        "KVM-256",
        "KVM 16*sqrt",
        "full attention",
        "a prefill in pieces differs",
        str(path),
    ):
        assert words in printed.out
    assert "1,100" not in printed.out
    assert "100% done" in printed.err
    written = json.loads(path.read_text())
    assert written["setting"]["lengths"] == [600]
    assert written["machine"]["threads"] == 1
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_a_device_or_a_length_that_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device tpu"):
        bench_commands.bench_kvm("tpu", [], quick=True, threads=1, json_path=None)
    with pytest.raises(ConfigError, match="lengths"):
        bench_commands.bench_kvm("cpu", [0], quick=True, threads=1, json_path=None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only where there is no GPU")
def test_what_wants_a_gpu_says_so_where_there_is_none(tmp_path: Path) -> None:
    for call in (
        lambda: bench_commands.tune("cpu", [128], tmp_path / "rows.json"),
        lambda: bench_commands.bench_kvm("cuda", [], quick=True, threads=1, json_path=None),
    ):
        with pytest.raises(ConfigError, match="torch sees no GPU here"):
            call()
    with pytest.raises(ConfigError, match="--width 300"):
        bench_commands.tune("cuda", [128, 300], None)
    with pytest.raises(ConfigError, match="--tokens 1: want at least 2"):
        bench_commands.bench_kvm("cuda", [1], quick=True, threads=1, json_path=None)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("wide_terminal")
def test_the_compile_report_prints_what_the_compiler_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = pytest.importorskip("launch.kernel_tables", reason="needs Triton")
    row = tables.CompileRow(
        "read",
        "gfx942",
        "bfloat16",
        128,
        256,
        200,
        0,
        32_768,
        4,
        999,
        {"v_mfma": 64},
        0.5,
        "no buffers",
        0,
        "KEEP=True",
    )

    def compiled(classes: list[Any], workers: int, finished: Callable[[Any], None]) -> list[Any]:
        assert (len(classes), workers) == (4, 3)
        for one in classes:
            finished(one)
        return [row]

    monkeypatch.setattr(tables, "compile_report", compiled)
    path = tmp_path / "report.json"
    bench_commands.compile_report(quick=True, workers=3, json_path=path)
    printed, told = capsys.readouterr()
    assert " 25% done: sm_90 bfloat16 D=128 C=256" in told
    assert "100% done: gfx950" in told
    for words in ("read, KEEP=True", "gfx942, no buffers", "v_mfma 64", "50%", "32.0", "MI325X", "H200"):
        assert words in printed
    written = json.loads(path.read_text())
    assert written["compiled"][0]["registers"] == 200
    assert written["roofline"]["KVM-256"][0]["floor_seconds"] > 0
