"""The numbers of a miniature campaign, and what can be said of them. Imports no torch."""

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import mean
from typing import Any, Literal

import numpy as np

from kvm_dist.miniature.grid import Grid, Task, Trial
from kvm_dist.miniature.recall import VALUES

CHANCE = 1 / VALUES
LEVEL = 0.05  # shares of all seeds this close to each other are called level
LEARNT_WITHIN = 16  # tokens: inside the window of every model, where no memory is asked for
LEARNT = 0.5

Verdict = Literal["more", "less", "level", "undecided"]


@dataclass(frozen=True)
class Sample:
    """A number measured once for every seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def against(self, other: "Sample") -> Verdict:
        """More or less only where no seed of one reaches any seed of the other."""
        if max(self.high, other.high) - min(self.low, other.low) <= LEVEL:
            return "level"
        if self.low > other.high:
            return "more"
        return "less" if self.high < other.low else "undecided"


class Findings:
    """The evaluations of all trained runs of a grid."""

    def __init__(self, grid: Grid, results: dict[Trial, dict[str, Any]]) -> None:
        self.grid = grid
        self.results = results

    @classmethod
    def read(cls, grid: Grid) -> "Findings":
        """All evaluations beside the runs."""
        return cls(grid, {trial: json.loads(grid.result_path(trial).read_bytes()) for trial in grid.trials})

    def models(self, task: Task) -> tuple[str, ...]:
        return self.grid.models(task)

    def of(self, task: Task, model: str) -> list[dict[str, Any]]:
        """The results of all seeds of a model."""
        found = [r for trial, r in self.results.items() if (trial.task, trial.model) == (task, model)]
        return sorted(found, key=lambda result: result["seed"])

    def loads(self) -> list[tuple[int, int]]:
        """Lengths and numbers of pairs that were asked for."""
        return [(tokens, pairs) for tokens, loads in self.grid.loads.items() for pairs in loads]

    def seeds_of_text(self) -> int:
        """The fewest of a model."""
        return min(len(self.of("text", model)) for model in self.models("text"))

    def parameters(self, task: Task, model: str) -> int:
        return int(self.of(task, model)[0]["parameters"])

    @property
    def trained_tokens(self) -> int:
        """The length of a training sequence."""
        return next(iter(self.grid.loads))

    def seeds_that_learnt(self, model: str) -> int:
        """Seeds that recall at least half of the values over distances inside every window: they know what
        is asked for, whatever their memory holds."""
        return sum(self._share_within(result) >= LEARNT for result in self.of("recall", model))

    def _share_within(self, result: dict[str, Any]) -> float:
        cells = [
            cell
            for cell in result["recall"]
            if cell["tokens"] == self.trained_tokens and 2 ** (cell["octave"] + 1) <= LEARNT_WITHIN
        ]
        return float(sum(cell["right"] for cell in cells) / max(1, sum(cell["asked"] for cell in cells)))

    def recall(self, model: str, tokens: int, pairs: int, beyond: int = 0) -> Sample | None:
        """Share of values recalled at a load, over distances of at least `beyond` tokens, a power of two;
        None if none was asked."""
        shares = []
        for result in self.of("recall", model):
            cells = [
                cell
                for cell in result["recall"]
                if (cell["tokens"], cell["pairs"]) == (tokens, pairs) and 2 ** cell["octave"] >= beyond
            ]
            if not cells:
                return None
            shares.append(sum(cell["right"] for cell in cells) / sum(cell["asked"] for cell in cells))
        return Sample(tuple(shares)) if shares else None

    def recall_map(self, model: str, tokens: int) -> dict[tuple[int, int], float]:
        """(pairs, octave of distances) -> share recalled, all seeds together."""
        right: dict[tuple[int, int], int] = defaultdict(int)
        asked: dict[tuple[int, int], int] = defaultdict(int)
        for result in self.of("recall", model):
            for cell in result["recall"]:
                if cell["tokens"] == tokens:
                    right[cell["pairs"], cell["octave"]] += cell["right"]
                    asked[cell["pairs"], cell["octave"]] += cell["asked"]
        return {key: right[key] / asked[key] for key in asked}

    def bits_per_byte(self, model: str) -> float:
        """Of held-out text, mean over seeds."""
        return mean(mean(result["sequence_losses"]) / math.log(2) for result in self.of("text", model))

    def bits_above(self, model: str, other: str) -> tuple[float, float]:
        """How many bits per byte a model needs more than another on the same held-out sequences, and twice
        the standard error of that mean over sequences."""
        ours, theirs = (
            np.mean([result["sequence_losses"] for result in self.of("text", name)], axis=0)
            for name in (model, other)
        )
        differences = (ours - theirs) / math.log(2)
        error = differences.std(ddof=1) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
        return float(differences.mean()), 2 * float(error)

    def bits_by_position(self, model: str) -> tuple[list[float], list[float]]:
        """The middle of every block of positions, and the bits per byte in it."""
        results = self.of("text", model)
        step = results[0]["block_tokens"]
        bits = np.mean([result["position_losses"] for result in results], axis=0) / math.log(2)
        return [(index + 0.5) * step for index in range(len(bits))], bits.tolist()
