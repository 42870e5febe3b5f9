"""What the miniature report says follows from the numbers it is given."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvm_dist.load import dump_config, load_config
from kvm_dist.metrics import append_metrics
from kvm_dist.miniature.findings import Findings, Sample
from kvm_dist.miniature.grid import (
    ABLATIONS,
    CONFIGS,
    FAMILIES,
    FIXED_SLOTS,
    Grid,
    Trial,
    full_grid,
)
from kvm_dist.miniature.report import write_report
from kvm_dist.miniature.statements import (
    EXPECTED,
    ablations,
    contrast,
    expectations,
    learnt_sentence,
    text_sentence,
)
from models.budget import FixedBudget

Recalled = Callable[[str, int, int, int], float]  # of model, seed, tokens, pairs


def findings(
    grid: Grid,
    recalled: Recalled,
    bits: Callable[[str], float] = lambda model: 2.0,
    near: Callable[[str, int], float] = lambda model, seed: 1.0,
) -> Findings:
    """As if every model had recalled these shares of 1000 values far off and near, and needed these bits."""
    results: dict[Trial, dict[str, Any]] = {}
    for trial in grid.trials:
        result: dict[str, Any] = {
            "task": trial.task,
            "model": trial.model,
            "seed": trial.seed,
            "parameters": 5,
        }
        if trial.task == "recall":
            result["recall"] = [
                {
                    "tokens": tokens,
                    "pairs": pairs,
                    "octave": octave,
                    "asked": 1000,
                    "right": round(
                        1000 * recalled(trial.model, trial.seed, tokens, pairs)
                        if octave >= 6
                        else 1000 * near(trial.model, trial.seed)
                    ),
                }
                for tokens, loads in grid.loads.items()
                for pairs in loads
                for octave in (3, 7, 8)
            ]
        else:
            nats = bits(trial.model) * math.log(2)
            result |= {"sequence_losses": [nats - 0.1, nats, nats + 0.1], "block_tokens": 32}
            result["position_losses"] = [nats + 0.5, nats]
        results[trial] = result
    return Findings(grid, results)


def small(grid: Grid) -> Grid:
    return replace(grid, loads={256: (8, 62), 512: (62,)})


def test_a_difference_counts_only_where_the_seeds_do_not_overlap() -> None:
    assert Sample((0.5, 0.6)).against(Sample((0.3, 0.49))) == "more"
    assert Sample((0.3, 0.49)).against(Sample((0.5, 0.6))) == "less"
    assert Sample((0.3, 0.55)).against(Sample((0.5, 0.6))) == "undecided"
    assert Sample((0.97, 0.98)).against(Sample((0.99, 1.0))) == "level"
    assert Sample((0.9, 0.98)).against(Sample((0.99, 1.0))) == "less"


def test_distances_inside_the_windows_are_left_out_of_comparisons() -> None:
    found = findings(small(full_grid(Path("x"))), lambda *_: 0.5)
    recalled = found.recall("rwkv7", 256, 8, 128)
    assert recalled is not None
    assert recalled.values == (0.5, 0.5, 0.5)
    everywhere = found.recall("rwkv7", 256, 8)
    assert everywhere is not None
    assert everywhere.mean == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("sqrt", "fixed", "more", "no_less"),
    [
        (0.9, 0.2, "as expected", "as expected"),
        (0.2, 0.9, "against expectation", "against expectation"),
        (0.5, 0.5, "against expectation", "as expected"),  # level
        (0.56, 0.5, "not decided", "not decided"),  # the seeds overlap
    ],
)
def test_the_outcome_of_an_expectation_is_what_the_seeds_show(
    sqrt: float, fixed: float, more: str, no_less: str
) -> None:
    def recalled(model: str, seed: int, tokens: int, pairs: int) -> float:
        step = 0.04 if (sqrt, model) == (0.56, "kvm-fixed") else 0.01
        return {"kvm-sqrt": sqrt, "kvm-fixed": fixed}.get(model, 0.1) + step * seed

    found = contrast(findings(small(full_grid(Path("x"))), recalled), "kvm-sqrt", "kvm-fixed")
    assert found is not None
    assert (found.outcome(), found.outcome(no_less=True)) == (more, no_less)
    assert f"{100 * sqrt + 1:.0f} % ({100 * sqrt:.0f} to {100 * sqrt + 2:.0f})" in found.sentence()


def test_more_at_one_load_and_less_at_another_is_mixed_and_the_largest_difference_is_named() -> None:
    def recalled(model: str, seed: int, tokens: int, pairs: int) -> float:
        if model != "kvm-sqrt":
            return 0.5
        return {(256, 8): 0.6, (256, 62): 0.5, (512, 62): 0.1}[tokens, pairs]

    found = contrast(findings(small(full_grid(Path("x"))), recalled), "kvm-sqrt", "rwkv7")
    assert found is not None
    assert (found.outcome(), found.largest) == ("mixed", (512, 62))
    assert "3 loads: recalls more at 1, less at 1, level at 1." in found.sentence()


def test_more_at_fewer_than_half_of_the_loads_decides_nothing() -> None:
    def recalled(model: str, seed: int, tokens: int, pairs: int) -> float:
        if model != "kvm-sqrt":
            return 0.5
        return 0.9 if (tokens, pairs) == (256, 8) else (0.3, 0.5, 0.7)[seed]

    found = contrast(findings(small(full_grid(Path("x"))), recalled), "kvm-sqrt", "rwkv7")
    assert found is not None
    assert found.outcome() == "not decided"
    assert "recalls more at 1, the ranges over seeds overlap at 2." in found.sentence()


def test_an_expectation_is_asked_of_the_loads_it_is_about() -> None:
    found = findings(full_grid(Path("x")), lambda *_: 0.5)
    loads = {(one.model, one.other, one.longer): one.loads(found) for one in EXPECTED}
    assert {tokens for tokens, _ in loads["full-attention", "kvm-sqrt", False]} == {256}
    assert {tokens for tokens, _ in loads["kvm-sqrt", "full-attention", True]} == {512, 1024}
    assert {pairs for _, pairs in loads["kvm-sqrt", "kvm-fixed", None]} == {32, 62}
    fixed = load_config(CONFIGS / "recall-kvm-fixed.yaml").config.model.kvm.budget
    assert isinstance(fixed, FixedBudget)
    assert fixed.slots == FIXED_SLOTS


def test_a_model_that_does_not_recall_what_its_window_holds_has_not_learnt() -> None:
    def recalled(model: str, seed: int, tokens: int, pairs: int) -> float:
        return 0.1

    grid = full_grid(Path("x"), ["kvm-sqrt", "bswa"])
    found = findings(small(grid), recalled, near=lambda model, seed: 0.9 if seed or model == "bswa" else 0.3)
    assert [found.seeds_that_learnt(model) for model in ("kvm-sqrt", "bswa")] == [2, 3]
    assert "bswa learnt" in learnt_sentence(found)
    assert "kvm-sqrt (2 of 3)" in learnt_sentence(found)


def test_only_models_that_ran_are_compared() -> None:
    found = findings(small(full_grid(Path("x"), ["kvm-sqrt", "rwkv7"])), lambda *_: 0.5)
    assert [(one.model, one.other) for _, one in expectations(found)] == [("kvm-sqrt", "rwkv7")]
    assert list(ablations(found)) == []
    assert [one.other for one in ablations(findings(small(full_grid(Path("x"))), lambda *_: 0.5))] == list(
        ABLATIONS
    )


def test_the_sentence_on_text_counts_differences_beyond_their_error() -> None:
    def bits(model: str) -> float:
        return {"full-attention": 2.0, "bswa": 2.2}.get(model, 2.1)

    sentence = text_sentence(findings(full_grid(Path("x")), lambda *_: 0.5, bits))
    assert "2.000 (full-attention) to 2.200 (bswa) bits per byte, 10.0 % apart" in sentence
    assert f"{len(FAMILIES) - 1} of {len(FAMILIES) - 1} need more" in sentence
    same = text_sentence(findings(full_grid(Path("x")), lambda *_: 0.5))
    assert f"0 of {len(FAMILIES) - 1} need more" in same


def test_a_report_is_written_from_the_files_of_a_campaign(tmp_path: Path) -> None:
    grid = small(full_grid(tmp_path, ["kvm-sqrt", "kvm-fixed", "no-sink"]))
    made = findings(grid, lambda model, seed, *_: 0.8 if model == "kvm-sqrt" else 0.25)
    for trial, result in made.results.items():
        path = grid.result_path(trial)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(result))
        run = path.parents[1]
        (run / "config.yaml").write_text(dump_config(load_config(trial.config).config))
        append_metrics(run / "metrics.jsonl", 10, {"perf/tokens_per_second": 1234.0, "train/loss": 2.5})
    document, data, *pictures = write_report(grid)
    text = document.read_text()
    assert "kvm-sqrt against kvm-fixed, 2 loads: recalls more at 2." in text
    assert "3 of 3 |" in text
    assert "| 256 | 62 | 80 % (80 to 80) | 25 % (25 to 25) |" in text
    assert "1,234" in text
    assert [path.name in text for path in pictures] == [True] * 5
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert json.loads(data.read_text())["expectations"][0]["outcome"] == "as expected"
