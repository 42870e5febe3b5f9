"""`plot` of a sweep's folder: its runs side by side."""

from pathlib import Path

import pytest

from kvm_dist.exit_codes import ConfigError
from kvm_dist.metrics import append_metrics
from kvm_dist.sweep_results import read_members
from kvm_dist.tracking.sweep import declare_sweep
from launch.plot_command import plot


def write_run(folder: Path, rate: float, seed: int, losses: dict[str, float]) -> None:
    folder.mkdir(parents=True)
    text = f"name: {folder.name}\nseed: {seed}\noptimizer: {{learning_rate: {rate}}}\n"
    (folder / "config.yaml").write_text(text)
    if losses:
        append_metrics(folder / "metrics.jsonl", 7, losses)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "tried"
    declare_sweep(folder, "tried", "kvm-dist", {})
    write_run(folder / "000-a", 1e-3, 1, {"train/loss": 2.0, "validation/loss": 2.5})
    write_run(folder / "001-b", 2e-3, 1, {"train/loss": 1.5, "validation/loss": 2.25})
    write_run(folder / "002-c", 3e-3, 2, {"train/loss": float("nan")})
    write_run(folder / "003-d", 4e-3, 2, {})
    return folder


def test_runs_are_ranked_by_held_out_loss_and_only_what_varies_is_shown(sweep: Path) -> None:
    varied, members = read_members(sweep)
    assert varied == ("seed", "optimizer.learning_rate")
    assert [member.path.name for member in members] == ["001-b", "000-a", "002-c", "003-d"]
    assert [member.loss for member in members] == [2.25, 2.5, None, None]
    assert members[0].values == ("1", "0.002")
    assert [member.step for member in members] == [7, 7, 7, 0]


def test_a_sweep_is_shown_as_a_table_and_a_picture(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot(sweep)
    said = capsys.readouterr().out
    assert said.index("001-b") < said.index("000-a")
    assert "optimizer.learning_rate" in said
    assert (sweep / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no runs of a sweep"):
        read_members(tmp_path)
