"""The tables and files of `bench step`, `bench data` and `bench checkpoint`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvm_dist.bench.checkpoint import CheckpointBench
from kvm_dist.bench.step import StepBench
from kvm_dist.exit_codes import ConfigError
from launch import run_bench
from launch.console import table_console
from tests.kvm_dist.data.corpus import write_folder


def test_the_phases_of_a_step_stand_beside_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    phases = {"forward": 0.1, "backward": 0.3}
    found = StepBench("small", "cpu", 2, 4, 2, 128, (0.5, 0.3), phases, 480, 4e9, 2e10, 10**6, 1_500_000)
    table_console().print(run_bench.phases_table(found), run_bench.modelled_table(found))
    printed = capsys.readouterr().out
    for words in ("small: a step of 2 sequences, 128 tokens", "0.400 s, 320 tokens/s", "75.0%"):
        assert words in printed
    for words in ("0.200", "2.00", "20.0", "10.0", "1.50", "480 (120 a layer)"):
        assert words in printed


def test_a_save_that_is_slow_beside_its_disk_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [(0.1, 0.1), (2.0, 3.0), (1.0, 1.0), (1.0, 1.5), (0.9, 0.9)]
    found = CheckpointBench("large", "/disk", 3 * 10**8, 3 * 10**8, 5, *rounds)
    table_console().print(run_bench.checkpoint_table(found))
    lines = capsys.readouterr().out.splitlines()
    (save,) = (line for line in lines if "save, read back" in line)
    (load,) = (line for line in lines if "load, verified" in line)
    assert "50%" in save
    assert "wanted 70%" in save
    assert "90%" in load
    assert "met" in load
    table_console().print(run_bench.checkpoint_table(replace(found, bytes=10**6)))
    assert capsys.readouterr().out.count("too small to judge") == 2


def test_the_bench_of_data_prints_its_table_and_writes_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, path = str(write_folder(tmp_path / "text")), tmp_path / "results" / "data.json"
    run_bench.bench_data(source, "bytes", 64, 2, path)
    printed = capsys.readouterr()
    assert "check every sample" in printed.out
    assert "first batch of a resume" in printed.err
    written = json.loads(path.read_text())
    assert written["tokens"] == sum(file.stat().st_size for file in Path(source).rglob("*.txt"))
    assert written["machine"]["cpus"] >= 1


def test_numbers_are_written_though_nobody_reads_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody_reads(*_: object) -> None:
        raise SystemExit(141)

    monkeypatch.setattr("rich.console.Console.print", nobody_reads)
    source, path = str(write_folder(tmp_path / "text")), tmp_path / "data.json"
    with pytest.raises(SystemExit):
        run_bench.bench_data(source, "bytes", 64, 2, path)
    assert json.loads(path.read_text())["tokens"]


def test_a_length_that_a_model_cannot_have_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: {batch_sequences: 3}\n")
    with pytest.raises(ConfigError, match="not divisible"):
        run_bench.bench_step(tmp_path / "run.yaml", ["parallel.data=2"], None, 1, None)


def test_a_device_that_is_not_there_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "run.yaml").write_text("device: cuda\n")
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        run_bench.bench_checkpoint(tmp_path / "run.yaml", [], 1, None)
