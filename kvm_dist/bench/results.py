"""What a bench found, as data: medians, ratios, exponents, goals. Imports no torch."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from kvm_dist.bench.setting import BUDGETS, FULL_ATTENTION, Setting


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender at one length, a round each; rounds of all contenders take turns."""

    contender: str
    tokens: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @property
    def total(self) -> tuple[float, ...]:
        return tuple(there + back for there, back in zip(self.forward, self.backward, strict=True))


@dataclass(frozen=True)
class Decoding:
    """One token after another on a cached context."""

    contender: str
    context: int
    seconds: tuple[float, ...]  # one per token
    cache_bytes: int

    @property
    def mean(self) -> float:
        """The mean, not the median: now and then a token folds a chunk into the state."""
        return sum(self.seconds) / len(self.seconds)


@dataclass(frozen=True)
class Goal:
    name: str
    wanted: float
    got: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.got >= self.wanted if self.at_least else self.got <= self.wanted


@dataclass
class Results:
    setting: Setting
    machine: dict[str, Any] = field(default_factory=dict)
    timings: list[Timing] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)  # above inputs, outputs and their gradients
    decodings: list[Decoding] = field(default_factory=list)
    pieces_error: float | None = None  # largest difference of a prefill in pieces, of the largest output

    def timing(self, contender: str, tokens: int) -> Timing | None:
        found = [one for one in self.timings if (one.contender, one.tokens) == (contender, tokens)]
        return found[0] if found else None

    def speedup(self, contender: str, tokens: int) -> float | None:
        """How often it runs while full attention runs once: the median over rounds, each in itself."""
        own, full = self.timing(contender, tokens), self.timing(FULL_ATTENTION, tokens)
        if own is None or full is None:
            return None
        return median(slow / fast for slow, fast in zip(full.total, own.total, strict=True))

    def exponent(self, contender: str) -> float | None:
        """Growth of time from the shortest to the longest length timed: time ~ tokens**exponent."""
        own = sorted((one for one in self.timings if one.contender == contender), key=lambda one: one.tokens)
        if len(own) < 2:
            return None
        first, last = own[0], own[-1]
        growth = math.log(median(last.total) / median(first.total))
        return growth / math.log(last.tokens / first.tokens)

    def decoding(self, contender: str) -> Decoding | None:
        found = [one for one in self.decodings if one.contender == contender]
        return found[0] if found else None

    def decode_speedup(self, contender: str) -> float | None:
        own, full = self.decoding(contender), self.decoding(FULL_ATTENTION)
        return None if own is None or full is None else full.mean / own.mean

    def goals(self) -> Iterator[Goal]:
        """The goals that this bench's lengths can tell about."""
        fixed, power = BUDGETS
        speedups = {(fixed, 32_768): 14.0, (power, 32_768): 3.7, (fixed, 8_192): 3.5, (power, 8_192): 1.8}
        for (contender, tokens), wanted in speedups.items():
            got = self.speedup(contender, tokens)
            if got is not None:
                yield Goal(f"{contender}: times faster at {tokens:,}", wanted, got, at_least=True)
        if (min(self.setting.lengths), max(self.setting.lengths)) == (8_192, 65_536):
            for contender, wanted in ((fixed, 1.1), (power, 1.6)):
                got = self.exponent(contender)
                if got is not None:
                    yield Goal(f"{contender}: exponent 8K to 64K", wanted, got, at_least=False)
        if self.setting.memory_length == 32_768 and power in self.peak_bytes:
            yield Goal(f"{power}: GB above inputs and outputs", 0.6, self.peak_bytes[power] / 1e9, False)
        if self.setting.decode_context == 32_768:
            for contender, wanted in ((fixed, 15.0), (power, 5.0)):
                got = self.decode_speedup(contender)
                if got is not None:
                    yield Goal(f"{contender}: decode, times faster at 32K", wanted, got, at_least=True)

    def as_json(self) -> dict[str, Any]:
        """Everything measured, and what follows from it."""
        contenders = list(dict.fromkeys(one.contender for one in self.timings))
        return {
            **asdict(self),
            "setting": asdict(self.setting),
            "speedup": {
                contender: {
                    str(one.tokens): self.speedup(contender, one.tokens)
                    for one in self.timings
                    if one.contender == contender
                }
                for contender in contenders
                if contender != FULL_ATTENTION
            },
            "exponent": {contender: self.exponent(contender) for contender in contenders},
            "decode_speedup": {
                one.contender: self.decode_speedup(one.contender)
                for one in self.decodings
                if one.contender != FULL_ATTENTION
            },
            "goals": [asdict(goal) | {"met": goal.met} for goal in self.goals()],
        }
