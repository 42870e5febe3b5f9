"""The pictures of one run: loss over steps, loss over positions, and how the training went."""

import json
import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from kvm_dist.metrics import METRICS_NAME, read_metrics
from kvm_dist.plots.canvas import (
    AMBER,
    BLUE,
    GREEN,
    INK,
    RED,
    label_counts,
    mark,
    new_figure,
    plain,
    quiet,
    save,
)
from kvm_dist.plots.position import position_loss
from kvm_dist.plots.uniform import draw_uniform
from kvm_dist.progress import short_count

Records = Sequence[dict[str, float]]
_SMALLEST_RANGE = 0.1  # nats: less, and the noise of a few steps would look like a slope


def plot_run(run_dir: Path) -> list[Path]:
    """Draws what the run directory has data for into `plots/`; returns the pictures' paths."""
    facts = _facts(run_dir)
    records = read_metrics(run_dir / METRICS_NAME)
    pictures = []
    if series(records, "train/loss")[0]:
        pictures.append(
            loss_curve(
                run_dir / METRICS_NAME,
                run_dir / "plots" / "loss.png",
                title=facts["name"],
                unit=facts["unit"],
                vocab_size=facts["vocab_size"],
            )
        )
        pictures.append(_training(records, run_dir / "plots" / "training.png", facts["name"]))
    measured = run_dir / "position_loss.json"
    if measured.exists():
        found = json.loads(measured.read_text(encoding="utf-8"))
        block, losses = found["block_tokens"], found["losses"]
        pictures.append(
            position_loss(
                [(index + 0.5) * block for index in range(len(losses))],
                losses,
                run_dir / "plots" / "position_loss.png",
                title=f"{facts['name']}: loss by position in the sequence",
                unit=facts["unit"],
                subtitle=f"held-out sequences at step {found['step']:,}, means over {block:,} tokens",
            )
        )
    return pictures


def loss_curve(
    metrics_path: Path,
    out: Path,
    *,
    title: str = "",
    unit: str = "nats per token",
    vocab_size: int | None = None,
) -> Path:
    """Training loss (raw and smoothed) and validation loss over applied steps, on a square-root step axis.

    vocab_size: draws the loss of uniform guessing, ln(vocab_size), as reference.
    Raises ValueError if `metrics_path` holds no training loss.
    """
    records = read_metrics(metrics_path)
    steps, losses = series(records, "train/loss")
    if not steps:
        raise ValueError(f"{metrics_path}: holds no train/loss; train some steps first")
    validation = series(records, "validation/loss")
    figure = new_figure(
        f"{title}: loss while training" if title else "Loss while training", _summary(records)
    )
    axes = figure.add_axes((0.075, 0.115, 0.85, 0.7))
    axes.plot(steps, losses, color=BLUE, alpha=0.22, linewidth=1, label="train, each step")
    axes.plot(steps, smoothed(losses), color=BLUE, linewidth=2.2, label="train, smoothed")
    if validation[0]:
        axes.plot(*validation, color=RED, linewidth=1.4)
        axes.plot(
            *validation, "o", color=RED, markeredgecolor="white", label="validation, held-out documents"
        )
    guessing = _frame_losses(axes, steps, losses, validation[1], vocab_size)
    if validation[0]:
        mark(axes, validation[0][-1], validation[1][-1], RED)
    else:
        mark(axes, steps[-1], smoothed(losses)[-1], BLUE)
    if vocab_size is not None and guessing:
        draw_uniform(axes, vocab_size)
    quiet(axes, "applied optimizer step (square-root scale)", f"loss, {unit}")
    axes.yaxis.labelpad = 3  # room for marks with three decimals
    above = (1.0, 1.0)  # of the axes' corners: where there is no curve, however few steps there are
    axes.legend(
        loc="lower right", bbox_to_anchor=above, ncols=3, frameon=False, fontsize=11.5, labelcolor=INK
    )
    return save(figure, out)


def series(records: Records, key: str) -> tuple[list[int], list[float]]:
    """Steps and finite values of one metric."""
    found = [
        (int(record["step"]), record[key]) for record in records if math.isfinite(record.get(key, math.nan))
    ]
    return [step for step, _ in found], [value for _, value in found]


def smoothed(values: Sequence[float]) -> list[float]:
    """Mean around each point: a twelfth of the way back and forth, a fortieth of the curve at most."""
    sums = [0.0, *accumulate(values)]
    widest = len(values) // 40
    result = []
    for index in range(len(values)):
        half = min(index // 12, widest)
        first, behind = index - half, min(index + half + 1, len(values))
        result.append((sums[behind] - sums[first]) / (behind - first))
    return result


def _training(records: Records, out: Path, name: str) -> Path:
    """Four small panels: gradient norm, learning rate, speed, waiting for data."""
    figure = new_figure(f"{name}: how the training went", _summary(records))
    panels = [
        ("train/grad_norm", "gradient norm", RED),
        ("train/learning_rate", "learning rate", AMBER),
        ("perf/tokens_per_second", "tokens per second", BLUE),
        ("data/wait_seconds", "seconds waiting for data, a step", GREEN),
    ]
    grid = figure.add_gridspec(2, 2, left=0.075, right=0.965, bottom=0.1, top=0.8, hspace=0.5, wspace=0.2)
    for index, (key, label, color) in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(index, 2)])
        steps, values = series(records, key)
        exact = key == "train/learning_rate"
        axes.plot(steps, values, color=color, alpha=1.0 if exact else 0.25, linewidth=1.8 if exact else 1)
        if not exact:
            axes.plot(steps, smoothed(values), color=color, linewidth=1.8)
        axes.set_title(label, loc="left", fontsize=12, color=INK, pad=8)
        quiet(axes, "applied step" if index > 1 else "", "")
        axes.set_ylim(bottom=0, top=_robust_top(values))
        label_counts(axes)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    return save(figure, out)


def _robust_top(values: Sequence[float]) -> float | None:
    """A single spike must not flatten the rest of a panel."""
    if not values:
        return None
    usual = sorted(values)[int(0.98 * (len(values) - 1))]
    return min(max(values), 2 * usual) * 1.08 or None


def _frame_losses(
    axes: Axes, steps: list[int], losses: list[float], validation: list[float], vocab_size: int | None
) -> bool:
    """The axes' range, and whether it holds the loss of uniform guessing: where the run starts near it."""
    axes.set_xscale("function", functions=(_square_root, _square))
    axes.set_xlim(0, steps[-1] * 1.1)
    axes.set_xticks(_round_steps(steps[-1]))
    label_counts(axes)
    curve = smoothed(losses)
    low, high = min([*curve, *validation]), max([*curve, *validation])
    guessing = vocab_size is not None and high > 0.75 * math.log(vocab_size)
    if vocab_size is not None and guessing:
        low, high = min(low, math.log(vocab_size)), max(high, math.log(vocab_size))
    margin = 0.06 * (high - low) + max(0.0, _SMALLEST_RANGE - (high - low)) / 2
    axes.set_ylim(low - margin, high + margin)
    return guessing


def _round_steps(last: int) -> list[float]:
    """About seven round ticks evenly spaced on a square-root axis, and the last step where there is room."""
    ticks = {0}
    for part in range(1, 8):
        value = last * (part / 7) ** 2
        unit = 10 ** max(math.floor(math.log10(value)), 0) if value >= 1 else 1
        ticks.add(round(value / unit * 2) * unit // 2)
    room = {tick for tick in ticks if _square_root(last) - _square_root(tick) > 0.08 * _square_root(last)}
    return sorted(room | {last})


def _square_root(values: Any) -> Any:
    return abs(values) ** 0.5


def _square(values: Any) -> Any:
    return values**2


def _summary(records: Records) -> str:
    """6,000 steps, 12.3M tokens, best validation 1.402 at step 5,500."""
    steps, _ = series(records, "train/loss")
    parts = [f"{steps[-1]:,} steps"]
    _, tokens = series(records, "train/tokens")
    if tokens:
        parts.append(f"{short_count(tokens[-1])} tokens")
    validated, values = series(records, "validation/loss")
    if values:
        best = min(range(len(values)), key=values.__getitem__)
        parts.append(f"best validation loss {values[best]:.3f} at step {validated[best]:,}")
    return ", ".join(parts)


def _facts(run_dir: Path) -> dict[str, Any]:
    """Name, unit and vocabulary from the resolved config, as far as it is there."""
    path = run_dir / "config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    config = config if isinstance(config, dict) else {}
    is_bytes = (config.get("data") or {}).get("tokenizer", "bytes") == "bytes"
    return {
        "name": str(config.get("name", run_dir.name)),
        "unit": "nats per byte" if is_bytes else "nats per token",
        "vocab_size": (config.get("model") or {}).get("vocab_size"),
    }
