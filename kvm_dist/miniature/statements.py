"""Sentences that follow from the numbers of a campaign: none is written before they are known. No torch."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvm_dist.miniature.findings import Findings, Sample, Verdict
from kvm_dist.miniature.grid import ABLATED, ABLATIONS, FAMILIES, FIXED_SLOTS
from kvm_dist.miniature.recall import KEYS

BEYOND_WINDOWS = 128  # tokens: the windows of both layers together reach less far

Outcome = Literal["as expected", "against expectation", "mixed", "not decided"]


@dataclass(frozen=True)
class Expectation:
    """That `model` recalls more than `other`, or no less, at some loads.

    paper: the numbers of arXiv 2605.09877, 350M parameters. longer: at lengths beyond the trained one, at
    that one only, or (None) at all. pairs: fewest and most in a sequence.
    """

    claim: str
    paper: str
    model: str
    other: str
    no_less: bool = False
    longer: bool | None = None
    pairs: tuple[int, int] = (1, KEYS)

    def loads(self, findings: Findings) -> list[tuple[int, int]]:
        fewest, most = self.pairs
        return [
            (tokens, pairs)
            for tokens, pairs in findings.loads()
            if fewest <= pairs <= most and self.longer in (None, tokens > findings.trained_tokens)
        ]


EXPECTED: tuple[Expectation, ...] = (
    Expectation(
        f"a growing state recalls what a fixed one of {FIXED_SLOTS} slots has no room for",
        "needles S2 at 16K: 71.0 % against 3.6 %",
        "kvm-sqrt",
        "kvm-fixed",
        pairs=(FIXED_SLOTS + 1, KEYS),
    ),
    Expectation(
        "a growing state recalls what a recurrence has no room for",
        "S2 at 16K: 71.0 % against 2.0 %",
        "kvm-sqrt",
        "rwkv7",
        pairs=(FIXED_SLOTS + 1, KEYS),
    ),
    Expectation(
        "full attention is the ceiling at the trained length",
        "RULER at 4K: 47.2 % against 38.6 %",
        "full-attention",
        "kvm-sqrt",
        no_less=True,
        longer=False,
    ),
    Expectation(
        "beyond the trained length a growing state recalls more than full attention",
        "S1 at 32K: 98.4 % against 22.4 %; S2: 71.0 % against 45.2 % at 16K, 17.0 % against 20.8 % at 32K",
        "kvm-sqrt",
        "full-attention",
        longer=True,
    ),
    Expectation(
        "few pairs fit a fixed state, and a window loses them",
        "S1 at 32K: 98.8 % against 2.6 %",
        "kvm-fixed",
        "bswa",
        pairs=(1, FIXED_SLOTS // 2),
    ),
    Expectation(
        "a hybrid recalls what the recurrence alone does not",
        "no number",
        "kvm-rwkv7",
        "rwkv7",
        pairs=(FIXED_SLOTS + 1, KEYS),
    ),
)


@dataclass(frozen=True)
class Contrast:
    """Two models over the loads that were measured. largest: the load with the largest difference."""

    model: str
    other: str
    verdicts: tuple[Verdict, ...]
    largest: tuple[int, int]
    samples: tuple[Sample, Sample]

    def outcome(self, no_less: bool = False) -> Outcome:
        """Of the expectation that `model` recalls more, or no less: it holds if it does at more than half of
        the loads and fails at none, and is refuted if it fails at more than half."""
        count = Counter(self.verdicts)
        holds = count["more"] + (count["level"] if no_less else 0)
        fails = count["less"] + (0 if no_less else count["level"])
        half = len(self.verdicts) / 2
        if holds > half and not count["less"]:
            return "as expected"
        if fails > half and not count["more"]:
            return "against expectation"
        return "mixed" if holds and fails else "not decided"

    def sentence(self) -> str:
        """At how many loads which of the two recalls more, and where they are furthest apart."""
        count: Counter[str] = Counter(self.verdicts)
        tokens, pairs = self.largest
        one, two = self.samples
        parts = [
            f"{what} at {count[verdict]}"
            for verdict, what in (("more", "recalls more"), ("less", "less"), ("level", "level"))
            if count[verdict]
        ]
        if count["undecided"]:
            parts.append(f"the ranges over seeds overlap at {count['undecided']}")
        return (
            f"{self.model} against {self.other}, {_count(len(self.verdicts), 'load')}: {', '.join(parts)}. "
            f"Furthest apart at {tokens:,} tokens and {pairs} pairs: {percent(one)} against {percent(two)}."
        )


def contrast(
    findings: Findings, model: str, other: str, loads: list[tuple[int, int]] | None = None
) -> Contrast | None:
    """At `loads`, or at all; None if one of the models was not measured at any."""
    samples = {
        load: (one, two)
        for load in (findings.loads() if loads is None else loads)
        if (one := findings.recall(model, *load, BEYOND_WINDOWS))
        and (two := findings.recall(other, *load, BEYOND_WINDOWS))
    }
    if not samples:
        return None
    largest = max(samples, key=lambda load: abs(samples[load][0].mean - samples[load][1].mean))
    verdicts = tuple(one.against(two) for one, two in samples.values())
    return Contrast(model, other, verdicts, largest, samples[largest])


def expectations(findings: Findings) -> Iterator[tuple[Expectation, Contrast]]:
    """What the paper's results let expect, and what came out."""
    for expected in EXPECTED:
        if found := contrast(findings, expected.model, expected.other, expected.loads(findings)):
            yield expected, found


def ablations(findings: Findings) -> Iterator[Contrast]:
    """The whole operator against each of its ablations."""
    for ablation in ABLATIONS:
        if found := contrast(findings, ABLATED, ablation):
            yield found


def learnt_sentence(findings: Findings) -> str:
    """Which models know the task, so that what they do not recall is what their memory lost."""
    known, others = [], []
    for model in findings.models("recall"):
        seeds, learnt = len(findings.of("recall", model)), findings.seeds_that_learnt(model)
        if learnt == seeds:
            known.append(model)
        else:
            others.append(f"{model} ({learnt} of {seeds})")
    if not others:
        return "All models learnt what is asked for with every seed: what one does not recall, it has lost."
    if not known:
        return f"No model learnt what is asked for with every seed: {', '.join(others)}."
    return (
        f"With every seed {', '.join(known)} learnt what is asked for: what they do not recall, they have "
        f"lost. With some only: {', '.join(others)}; a seed that has not learnt says nothing of a memory."
    )


def text_sentence(findings: Findings) -> str:
    """How close the families are on text."""
    models = [model for model in findings.models("text") if model in FAMILIES]
    bits = {model: findings.bits_per_byte(model) for model in models}
    if len(bits) < 2:
        return "One family alone: nothing to compare."
    best, worst = min(bits, key=bits.__getitem__), max(bits, key=bits.__getitem__)
    others = [findings.bits_above(model, best) for model in models if model != best]
    clear = sum(difference > error for difference, error in others)
    return (
        f"The families need {bits[best]:.3f} ({best}) to {bits[worst]:.3f} ({worst}) bits per byte, "
        f"{100 * (bits[worst] / bits[best] - 1):.1f} % apart. {clear} of {len(others)} need more than the "
        "best by more than twice the standard error over held-out sequences; what another seed would change "
        f"is not measured with {_count(findings.seeds_of_text(), 'seed')}."
    )


def percent(sample: Sample) -> str:
    """The mean and, of several seeds, their range."""
    if len(sample.values) == 1:
        return f"{100 * sample.mean:.0f} %"
    return f"{100 * sample.mean:.0f} % ({100 * sample.low:.0f} to {100 * sample.high:.0f})"


def _count(number: int, what: str) -> str:
    return f"one {what}" if number == 1 else f"{number} {what}s"
