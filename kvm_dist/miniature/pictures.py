"""Which pictures a campaign gets, from its findings."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from kvm_dist.metrics import METRICS_NAME, read_metrics
from kvm_dist.miniature.findings import Findings, Sample
from kvm_dist.miniature.grid import ABLATED, ABLATIONS, FAMILIES
from kvm_dist.miniature.statements import BEYOND_WINDOWS
from kvm_dist.plots.miniature import Spread, recall_by_load, recall_maps
from kvm_dist.plots.miniature_ablations import ablation_rows
from kvm_dist.plots.miniature_learning import learning_curves
from kvm_dist.plots.miniature_text import text_by_position

SMOOTHED = 5  # logged steps: batches differ in their loads


def draw(findings: Findings, folder: Path) -> dict[str, Path]:
    """Name of every picture, as in the report, and where it is."""
    families = [model for model in findings.models("recall") if model in FAMILIES]
    pictures = {}
    if families:
        pictures["recall-by-load"] = _recall_by_load(findings, families, folder / "miniature-recall.png")
        longest = max(findings.grid.loads)
        pictures["recall-maps"] = recall_maps(
            {model: findings.recall_map(model, longest) for model in families},
            longest,
            folder / "miniature-maps.png",
            "share of values recalled in %, all seeds; windows of both layers reach 94 tokens at most",
        )
        pictures["learning"] = _learning(findings, families, folder / "miniature-learning.png")
        pictures["text"] = _text(findings, families, folder / "miniature-text.png")
    ablated = [model for model in findings.models("recall") if model in (ABLATED, *ABLATIONS)]
    if ABLATED in ablated and len(ablated) > 1:
        pictures["ablations"] = _ablations(findings, ablated, folder / "miniature-ablations.png")
    return pictures


def _recall_by_load(findings: Findings, models: Sequence[str], out: Path) -> Path:
    trained = next(iter(findings.grid.loads))
    panels = {}
    for tokens, loads in findings.grid.loads.items():
        samples = {
            model: {pairs: findings.recall(model, tokens, pairs, BEYOND_WINDOWS) for pairs in loads}
            for model in models
        }
        title = f"{tokens:,} tokens" + (", as trained" if tokens == trained else "")
        panels[title] = {
            model: {pairs: _spread(one) for pairs, one in points.items() if one is not None}
            for model, points in samples.items()
        }
    subtitle = (
        f"over distances of {BEYOND_WINDOWS} tokens and more; lines: means over seeds, bands: all seeds"
    )
    return recall_by_load(panels, out, subtitle)


def _text(findings: Findings, models: Sequence[str], out: Path) -> Path:
    curves = {model: findings.bits_by_position(model) for model in models}
    best = min(models, key=findings.bits_per_byte)
    totals = {}
    for model in models:
        difference, error = findings.bits_above(model, best)
        totals[model] = Spread(difference, difference - error, difference + error)
    return text_by_position(curves, totals, out, "right: bars of two standard errors over held-out sequences")


def _learning(findings: Findings, models: Sequence[str], out: Path) -> Path:
    curves = {}
    for model in models:
        runs = (
            findings.grid.out / f"recall-{model}-seed{seed}" for seed in findings.grid.seeds("recall", model)
        )
        curves[model] = [_losses(run / METRICS_NAME) for run in runs]
    subtitle = f"training loss of the recall task, mean over the last {SMOOTHED} logged steps; lines: seeds"
    return learning_curves(curves, out, subtitle)


def _losses(metrics: Path) -> tuple[list[int], list[float]]:
    """Logged steps and the mean loss of the last few of them."""
    logged = [
        (record["step"], record["train/loss"]) for record in read_metrics(metrics) if "train/loss" in record
    ]
    losses = [loss for _, loss in logged]
    means = [mean(losses[max(0, end - SMOOTHED) : end]) for end in range(1, len(losses) + 1)]
    return [int(step) for step, _ in logged], means


def _ablations(findings: Findings, models: Sequence[str], out: Path) -> Path:
    """The hardest loads of the training length and of the longest."""
    panels, labels = {}, {}
    for tokens in dict.fromkeys((min(findings.grid.loads), max(findings.grid.loads))):
        pairs = max(findings.grid.loads[tokens])
        title = f"{tokens:,} tokens, {pairs} pairs"
        samples = {model: findings.recall(model, tokens, pairs, BEYOND_WINDOWS) for model in models}
        panels[title] = {model: one.values for model, one in samples.items() if one is not None}
        labels[title] = "share of values recalled"
    return ablation_rows(panels, labels, out, "pale dots: seeds, bars: their mean")


def _spread(sample: Sample) -> Spread:
    return Spread(sample.mean, sample.low, sample.high)
