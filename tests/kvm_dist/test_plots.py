"""Pictures of a run."""

import json
import math
import struct
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from kvm_dist.metrics import append_metrics
from kvm_dist.plots import loss_curve, plot_run, position_loss
from kvm_dist.plots.position import half_octaves
from kvm_dist.plots.run import series, smoothed


def write_run(run_dir: Path, steps: int) -> None:
    run_dir.mkdir()
    for step in range(1, steps + 1):
        metrics = {"train/loss": 5.5 / step**0.2, "train/grad_norm": 1.0, "train/tokens": 64.0 * step}
        if step % 5 == 0:
            metrics["validation/loss"] = 5.6 / step**0.2
        append_metrics(run_dir / "metrics.jsonl", step, metrics)
    (run_dir / "config.yaml").write_text("name: sample\nmodel: {vocab_size: 256}\ndata: {tokenizer: bytes}\n")
    record = {"step": steps, "block_tokens": 16, "losses": [3.0, 2.0, 1.5]}
    (run_dir / "position_loss.json").write_text(json.dumps(record))


def size_of(picture: Path) -> tuple[int, int]:
    header = picture.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", header[16:])
    return width, height


def test_a_run_gets_its_pictures_in_full_size(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 40)
    pictures = plot_run(tmp_path / "run")
    assert [picture.name for picture in pictures] == ["loss.png", "training.png", "position_loss.png"]
    assert {size_of(picture) for picture in pictures} == {(1600, 1000)}
    assert sorted(path.name for path in (tmp_path / "run/plots").iterdir()) == sorted(
        p.name for p in pictures
    )


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_run_of_very_few_steps_can_be_drawn(tmp_path: Path, steps: int) -> None:
    write_run(tmp_path / "run", steps)
    assert len(plot_run(tmp_path / "run")) == 3


@pytest.mark.parametrize("first", [5.50, 5.545, 5.60], ids=["below", "at", "above"])
@pytest.mark.parametrize("steps", [1, 3, 20, 500])
def test_the_line_of_uniform_guessing_and_its_name_are_seen(
    steps: int, first: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr("kvm_dist.plots.run.save", lambda figure, out: drawn.append(figure))
    path = tmp_path / "metrics.jsonl"
    for step in range(1, steps + 1):
        loss = first - 0.01 * (step - 1)
        append_metrics(path, step, {"train/loss": loss, "validation/loss": loss})
    loss_curve(path, tmp_path / "loss.png", vocab_size=256)

    (figure,) = drawn
    figure.draw_without_rendering()
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    (name,) = (text for text in axes.texts if "uniform guessing" in text.get_text())
    (mark,) = (text for text in axes.texts if text is not name)
    frame, place = axes.get_window_extent(), name.get_window_extent()
    height = axes.transData.transform((0, math.log(256)))[1]
    assert frame.ymin < height < frame.ymax
    written = axes.get_tightbbox()
    assert written is not None
    assert figure.bbox.xmin < written.xmin
    assert not legend.get_window_extent().overlaps(frame)
    assert not legend.get_window_extent().overlaps(place)
    assert not mark.get_window_extent().overlaps(place)
    curve = axes.lines[1].get_xydata()
    assert not any(place.contains(*point) for point in axes.transData.transform(curve))


def test_a_run_without_metrics_has_no_pictures(tmp_path: Path) -> None:
    assert plot_run(tmp_path) == []
    with pytest.raises(ValueError, match="holds no train/loss"):
        loss_curve(tmp_path / "metrics.jsonl", tmp_path / "loss.png")


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step, loss in enumerate([3.0, math.nan, math.inf, 2.0]):
        append_metrics(path, step, {"train/loss": loss})
    assert size_of(loss_curve(path, tmp_path / "loss.png")) == (1600, 1000)
    assert series([{"step": 1, "a": math.nan}, {"step": 2}, {"step": 3, "a": 4.0}], "a") == ([3], [4.0])


def test_position_loss_draws_one_point_too(tmp_path: Path) -> None:
    assert size_of(position_loss([8.0], [2.0], tmp_path / "position.png")) == (1600, 1000)


def test_smoothing_keeps_constants_and_lags_behind_no_slope() -> None:
    assert smoothed([]) == []
    assert smoothed([2.0] * 200) == [2.0] * 200
    slope = smoothed([float(step) for step in range(400)])
    assert slope[100:300] == pytest.approx([float(step) for step in range(100, 300)])


def test_half_octaves_average_the_many_late_blocks_and_leave_the_first_alone() -> None:
    positions = [32.0 + 64 * block for block in range(32)]
    centres, means = half_octaves(positions, [float(block) for block in range(32)])
    assert (centres[0], means[0]) == (32.0, 0.0)
    assert means[-1] == pytest.approx(sum(range(27, 32)) / 5)
    assert len(means) < 12
