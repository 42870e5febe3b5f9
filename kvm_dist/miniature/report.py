"""The report of a miniature campaign: `report.md`, `report.json` and pictures. Imports no torch."""

import json
import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from kvm_dist.config import RunConfig
from kvm_dist.load import load_config
from kvm_dist.metrics import METRICS_NAME, read_metrics
from kvm_dist.miniature.findings import CHANCE, LEARNT_WITHIN, LEVEL, Findings
from kvm_dist.miniature.grid import ABLATED, FAMILIES, Grid, Task, training_seconds
from kvm_dist.miniature.pictures import draw
from kvm_dist.miniature.statements import (
    BEYOND_WINDOWS,
    ablations,
    expectations,
    learnt_sentence,
    percent,
    text_sentence,
)


def write_report(grid: Grid, diverged: Sequence[str] = ()) -> list[Path]:
    """Read every evaluation, write the report into `grid.out`; all paths written, the report first.

    diverged: names of runs that have no evaluation, as they did not end.
    """
    findings = Findings.read(grid)
    pictures = draw(findings, grid.out / "plots")
    document, data = grid.out / "report.md", grid.out / "report.json"
    document.write_text("\n".join(_lines(findings, pictures, diverged)) + "\n", encoding="utf-8")
    data.write_text(json.dumps(_numbers(findings), indent=1) + "\n", encoding="utf-8")
    return [document, data, *pictures.values()]


def _lines(findings: Findings, pictures: dict[str, Path], diverged: Sequence[str]) -> Iterator[str]:
    yield "# The paper in miniature"
    yield ""
    yield from _setting(findings)
    if diverged:
        yield f"Left out, as their loss or gradients were not finite: {', '.join(diverged)}."
        yield ""
    yield from _recall_section(findings, pictures)
    if findings.models("text"):
        yield from _text_section(findings, pictures)
    yield from _ablation_section(findings, pictures)
    yield from _limits(findings)


def _setting(findings: Findings) -> Iterator[str]:
    recall, text = (run_config(findings.grid, task) for task in ("recall", "text"))
    parameters = [findings.parameters("recall", model) for model in findings.models("recall")]
    spread = 100 * (max(parameters) / min(parameters) - 1)
    yield (
        f"{len(parameters)} models of {recall.model.num_layers} layers and width {recall.model.hidden_size}, "
        f"{min(parameters):,} to {max(parameters):,} parameters ({spread:.1f} % apart), each trained on the "
        f"same {_tokens(recall):,} tokens of the recall task ({recall.data.sequence_length} a sequence), the "
        f"families also on the same {_tokens(text):,} bytes of the source code of Python's standard library "
        f"({text.data.sequence_length} a sequence), at one learning rate for all "
        f"({recall.optimizer.learning_rate:g} and {text.optimizer.learning_rate:g})."
    )
    yield ""
    yield from _table(
        [
            "model",
            "layers",
            "parameters",
            "memory at 1,024 tokens, KiB",
            "tokens/s here",
            "seeds that learnt",
        ],
        [_model_row(findings, model) for model in findings.models("recall")],
    )
    spent = sum(training_seconds(findings.grid.out / trial.name) for trial in findings.grid.trials) / 60
    yield (
        f"Python {platform.python_version()}, torch {version('torch')}, float32, one CPU thread a run; "
        f"{len(findings.grid.trials)} runs took {spent:.0f} minutes, one after the other."
    )
    yield ""


def _model_row(findings: Findings, model: str) -> list[str]:
    config = run_config(findings.grid, "recall", model)
    kept = sum(
        config.model.layer_config(kind).cost(config.model, 1024).decode_state.size(4)
        for kind in config.model.layer_kinds
    )
    seeds = findings.grid.seeds("recall", model)
    speed = median(
        record["perf/tokens_per_second"]
        for seed in seeds
        for record in read_metrics(findings.grid.out / f"recall-{model}-seed{seed}" / METRICS_NAME)
        if "perf/tokens_per_second" in record
    )
    return [
        model,
        ", ".join(dict.fromkeys(config.model.layer_kinds)),
        f"{findings.parameters('recall', model):,}",
        f"{kept / 1024:.0f}",
        f"{speed:,.0f}",
        f"{findings.seeds_that_learnt(model)} of {len(seeds)}",
    ]


def _recall_section(findings: Findings, pictures: dict[str, Path]) -> Iterator[str]:
    trained = next(iter(findings.grid.loads))
    loads = ", ".join(f"{pairs} pairs {often} times" for pairs, often in findings.grid.training_loads)
    yield "## Recall"
    yield ""
    yield (
        "A sequence holds pairs of a key and a value, new in every sequence, among random filler. Each pair "
        "is seen twice; counted is how often the likeliest value after the second key is the right one "
        f"(chance: {100 * CHANCE:.1f} %), here over distances of at least {BEYOND_WINDOWS} tokens, further "
        f"than windows reach. Mean over seeds (smallest to largest). Trained at {trained} tokens with "
        f"{loads}."
    )
    yield ""
    yield (
        "A seed has learnt what is asked for if it recalls at least half of the values over distances below "
        f"{LEARNT_WITHIN} tokens, which are inside every window. {learnt_sentence(findings)}"
    )
    yield ""
    yield from _recall_table(findings, [model for model in findings.models("recall") if model in FAMILIES])
    yield (
        "What arXiv 2605.09877 lets expect (in brackets its numbers, 350M parameters) and what came out. One "
        f"recalls more than another at a load if its worst seed is above the other's best; {LEVEL:.0%} apart "
        "or less is level:"
    )
    yield ""
    for expected, contrast in expectations(findings):
        claim = expected.claim[0].upper() + expected.claim[1:]
        outcome = contrast.outcome(expected.no_less).capitalize()
        yield f"- {claim} ({expected.paper})? **{outcome}**: {contrast.sentence()}"
    yield ""
    yield from _shown(pictures, "recall-by-load", "recall-maps", "learning")


def _recall_table(findings: Findings, models: Sequence[str]) -> Iterator[str]:
    rows = []
    for tokens, pairs in findings.loads():
        samples = [findings.recall(model, tokens, pairs, BEYOND_WINDOWS) for model in models]
        rows.append([f"{tokens:,}", str(pairs), *(percent(one) if one else "-" for one in samples)])
    yield from _table(["tokens", "pairs", *models], rows)


def _text_section(findings: Findings, pictures: dict[str, Path]) -> Iterator[str]:
    models = findings.models("text")
    best = min(models, key=findings.bits_per_byte)
    yield "## Text"
    yield ""
    yield text_sentence(findings)
    yield ""
    rows = []
    for model in models:
        bits = findings.bits_per_byte(model)
        difference, error = findings.bits_above(model, best)
        above = "" if model == best else f"{difference:+.3f} ± {error:.3f}"
        rows.append([model, f"{bits * math.log(2):.4f}", f"{bits:.4f}", above])
    yield from _table(["model", "nats per byte", "bits per byte", f"above {best}, ± 2 standard errors"], rows)
    yield from _shown(pictures, "text")


def _ablation_section(findings: Findings, pictures: dict[str, Path]) -> Iterator[str]:
    found = list(ablations(findings))
    if not found:
        return
    yield "## Ablations"
    yield ""
    yield (
        f"{ABLATED} without one of its parts, everything else the same. The paper's, of KVM with 256 slots "
        "and 120M parameters (needles S2 at 4K): whole 88.8 %, no sink 37.6 %, no temperatures 55.0 %, no "
        "merge gate 33.8 %, no value radius 14.4 %."
    )
    yield ""
    yield from _recall_table(findings, [ABLATED, *(contrast.other for contrast in found)])
    for contrast in found:
        yield f"- {contrast.sentence()}"
    yield ""
    yield from _shown(pictures, "ablations")


def _limits(findings: Findings) -> Iterator[str]:
    recall, text = (run_config(findings.grid, task) for task in ("recall", "text"))
    seeds = sorted({len(findings.of("recall", model)) for model in findings.models("recall")}, reverse=True)
    yield "## What these numbers do not say"
    yield ""
    yield (
        f"- How models of another size or longer training compare: these have {recall.model.hidden_size} "
        f"channels and saw {_tokens(recall):,} and {_tokens(text):,} tokens."
    )
    yield (
        "- How each does at its best: one learning rate, batch and schedule serve all of them, tuned for "
        "none. A model that recalls little may have learnt slowly rather than lack room."
    )
    yield (
        f"- How large the spread over seeds is: {' or '.join(map(str, seeds))} a model give a range at best, "
        "not a distribution; ranges that do not overlap are weak evidence where they nearly touch."
    )
    yield (
        "- Recall from language: keys and values are single tokens among random filler, so that what is "
        "worth keeping is easy to tell."
    )
    yield "- Text other than one corpus of Python code, and loss at contexts longer than those trained on."
    yield ""


def run_config(grid: Grid, task: Task, model: str | None = None) -> RunConfig:
    """The configuration that a run of the campaign was trained with."""
    trial = next(t for t in grid.trials if t.task == task and model in (None, t.model))
    return load_config(grid.out / trial.name / "config.yaml").config


def _tokens(config: RunConfig) -> int:
    return config.train.steps * config.train.batch_sequences * config.data.sequence_length


def _shown(pictures: dict[str, Path], *names: str) -> Iterator[str]:
    for name in names:
        if name in pictures:
            yield f"![{name.replace('-', ' ')}](plots/{pictures[name].name})"
            yield ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + " --- |" + " ---: |" * (len(head) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def _numbers(findings: Findings) -> dict[str, Any]:
    """All that the report is made from, and its statements."""
    grid = findings.grid
    return {
        "results": list(findings.results.values()),
        "recall": [
            {"model": model, "tokens": tokens, "pairs": pairs, "values": sample.values}
            for model in findings.models("recall")
            for tokens, pairs in findings.loads()
            if (sample := findings.recall(model, tokens, pairs, BEYOND_WINDOWS))
        ],
        "bits_per_byte": {model: findings.bits_per_byte(model) for model in findings.models("text")},
        "expectations": [
            {
                "expected": expected.claim,
                "outcome": contrast.outcome(expected.no_less),
                **asdict(contrast),
            }
            for expected, contrast in expectations(findings)
        ],
        "ablations": [asdict(contrast) for contrast in ablations(findings)],
        "seconds": {trial.name: training_seconds(grid.out / trial.name) for trial in grid.trials},
    }
