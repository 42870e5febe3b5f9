"""What the processes of the bench found on this machine, against what the replay says. Imports no torch."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from kvm_dist.bench.scaling.calibrate import (
    MeasuredLink,
    measured_programs,
    operation_between,
    operation_seconds,
)
from kvm_dist.bench.scaling.counts import Count, counts
from kvm_dist.bench.scaling.program import Program, Work
from kvm_dist.bench.scaling.replay import Span, Timeline, replay
from kvm_dist.bench.scaling.setting import Setting

WANTED_SPEEDUP, WANTED_ERROR = 1.7, 0.10
ELEMENT_BYTES = 4  # the bench computes in float32


@dataclass(frozen=True)
class Goal:
    name: str
    wanted: float
    got: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.got >= self.wanted if self.at_least else self.got <= self.wanted


@dataclass(frozen=True)
class Profile:
    """Seconds of one rank's real step. update: reduction, sums and optimizer, by the calibration."""

    rank: int
    computing: float
    waiting: float
    sending: float
    update: float


@dataclass(frozen=True)
class Measured:
    """Results of the tasks: `whole` of its one process, the others of every process."""

    setting: Setting
    whole: dict[str, Any]
    alone: Sequence[dict[str, Any]]
    together: Sequence[dict[str, Any]]
    heads: Sequence[dict[str, Any]]
    pairs: Sequence[dict[str, Any]]

    @classmethod
    def read(cls, setting: Setting, folders: dict[str, Path]) -> "Measured":
        found = {
            task: [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("rank-*.json"))]
            for task, folder in folders.items()
        }
        whole = found.pop("whole")[0]
        return cls(setting, whole, **found)

    @property
    def whole_seconds(self) -> float:
        """A step of one process with one thread; medians over steps here and below."""
        return median(self.whole["seconds"])

    @property
    def together_steps(self) -> list[float]:
        """Each step of all ranks, as long as its slowest rank."""
        return [max(one["seconds"] for one in ranks) for ranks in self._steps]

    @property
    def together_seconds(self) -> float:
        return median(self.together_steps)

    @property
    def heads_steps(self) -> list[float]:
        """The same of ranks that split KVM by heads."""
        return _slowest(self.heads)

    @property
    def heads_speedup(self) -> float:
        return self.whole_seconds / median(self.heads_steps)

    @property
    def pairs_steps(self) -> list[float]:
        """The same of ranks that train two sequences at once, from both ends: of both."""
        return _slowest(self.pairs)

    @property
    def pairs_seconds(self) -> float:
        """Of one of the two sequences."""
        return median(self.pairs_steps) / 2

    @property
    def pairs_speedup(self) -> float:
        return self.whole_seconds / self.pairs_seconds

    @property
    def speedup(self) -> float:
        return self.whole_seconds / self.together_seconds

    @property
    def modelled_speedup(self) -> float:
        return self.whole_seconds / self.timeline.seconds

    @property
    def error(self) -> float:
        """The replay's step against the measured one; positive: the replay is slower."""
        return self.timeline.seconds / self.together_seconds - 1

    @cached_property
    def link(self) -> MeasuredLink:
        return MeasuredLink.fit(self.together[0]["link"])

    @cached_property
    def programs(self) -> list[Program]:
        return measured_programs(self.alone)

    @cached_property
    def timeline(self) -> Timeline:
        """The step that the replay expects of the ranks."""
        return replay(self.programs, self.link)

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(start, stop) for start, stop in self.alone[0]["spans"]]

    @property
    def counts(self) -> list[Count]:
        model = self.setting.task_config("together").model
        recorded = [process["steps"][0]["events"] for process in self.together]
        return counts(model, self.spans, ELEMENT_BYTES, recorded)

    @property
    def real_timeline(self) -> Timeline:
        """The step of median length as its ranks' clocks saw it, which on one machine are one clock."""
        origin = min(one["begun"] for one in self._middle_step)
        ends = [one["begun"] + one["seconds"] - origin for one in self._middle_step]
        return Timeline([list(_worked(one, origin)) for one in self._middle_step], ends)

    @property
    def profiles(self) -> list[Profile]:
        """Of the step of median length."""
        update = median(one["tail_seconds"] for process in self.alone for one in process["rounds"])
        return [_profile(rank, one, update) for rank, one in enumerate(self._middle_step)]

    def goals(self) -> list[Goal]:
        agree = all(one.agrees for one in self.counts)
        return [
            Goal(f"speed-up of {self.setting.ranks} ranks over one", WANTED_SPEEDUP, self.speedup),
            Goal("replay against measured step, off by", WANTED_ERROR, abs(self.error), at_least=False),
            Goal("messages and bytes as the closed forms say", 1.0, float(agree)),
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "setting": asdict(self.setting),
            "spans": self.spans,
            "parameters": self.alone[0]["parameters"],
            "one_process_seconds": self.whole["seconds"],
            "ranks_seconds": self.together_steps,
            "speedup": self.speedup,
            "by_heads_seconds": self.heads_steps,
            "by_heads_speedup": self.heads_speedup,
            "in_pairs_seconds": self.pairs_steps,
            "in_pairs_speedup": self.pairs_speedup,
            "replayed_seconds": self.timeline.seconds,
            "replayed_speedup": self.modelled_speedup,
            "replay_error": self.error,
            "link": asdict(self.link) | {"measured": self.together[0]["link"]},
            "operations": [operation_seconds(program) for program in self.programs],
            "profiles": [asdict(one) for one in self.profiles],
            "counts": [asdict(one) for one in self.counts],
            "goals": [asdict(goal) | {"met": goal.met} for goal in self.goals()],
        }

    @property
    def _middle_step(self) -> tuple[dict[str, Any], ...]:
        steps = sorted(self._steps, key=lambda ranks: max(one["seconds"] for one in ranks))
        return steps[len(steps) // 2]

    @property
    def _steps(self) -> list[tuple[dict[str, Any], ...]]:
        """Per step what each rank says of it."""
        return list(zip(*(process["steps"] for process in self.together), strict=True))


def _slowest(processes: Sequence[dict[str, Any]]) -> list[float]:
    """Each step, as long as its slowest rank."""
    return [max(ranks) for ranks in zip(*(one["seconds"] for one in processes), strict=True)]


def _worked(step: dict[str, Any], origin: float) -> Iterator[tuple[Work, Span]]:
    """What one rank computed between its messages; the update follows the last."""
    at, before = step["begun"], None
    for event in [*step["events"], None]:
        until = step["begun"] + step["seconds"] if event is None else event["start"]
        name, phase = operation_between(before, event)
        layer = None if event is None else event["layer"]
        yield Work(name, until - at, phase, layer), Span(at - origin, until - origin)
        if event is not None:
            at, before = event["stop"], event


def _profile(rank: int, step: dict[str, Any], update: float) -> Profile:
    spent = {"send": 0.0, "receive": 0.0}
    for event in step["events"]:
        spent[event["operation"]] += event["stop"] - event["start"]
    computing = step["seconds"] - spent["send"] - spent["receive"] - update
    return Profile(rank, computing, spent["receive"], spent["send"], update)
