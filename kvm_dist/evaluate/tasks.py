"""The tasks of `kvm-dist evaluate`: one line each. Imports no torch."""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvm_dist.exit_codes import ConfigError

if TYPE_CHECKING:
    from kvm_dist.pretrained import Pretrained


_FLAGS = {"needles": "--needle", "depths": "--depth", "argument": "what stands behind its colon"}


class Watch(Protocol):
    """Is told how much of a task is done, in tokens or whatever a task counts."""

    def __call__(self, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class Options:
    """What a person may choose; every task reads its part. Unset: the task's own default.

    tokens: a context, for the needle several; limit: at most so many documents, sequences or questions;
    argument: what follows the colon of `--task TASK:ARGUMENT`. Raises ValueError for what no task can use.
    """

    data: Path | None = None
    tokens: tuple[int, ...] = ()
    limit: int | None = None
    seed: int = 0
    block_tokens: int = 1024
    minimum_tokens: int = 32_768
    haystack: Path | None = None
    needles: tuple[str, ...] = ()
    depths: tuple[float, ...] = ()
    samples: int = 5
    tasks_dir: Path | None = None
    shots: int | None = None
    argument: str = ""

    def __post_init__(self) -> None:
        for name in ("limit", "block_tokens", "minimum_tokens", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')}={value}: want at least 1")
        if any(count < 1 for count in self.tokens):
            raise ValueError(f"--tokens={min(self.tokens)}: want at least 1")
        if any(not 0 <= depth <= 1 for depth in self.depths):
            raise ValueError(
                f"--depth={self.depths}: want shares of the text, from 0 (its begin) to 1 (its end)"
            )

    @property
    def chosen(self) -> tuple[str, ...]:
        """What differs from its default, as `name=value`; `argument` is part of the task's name."""
        given = {one.name: getattr(self, one.name) for one in fields(Options) if one.name != "argument"}
        defaults = {one.name: one.default for one in fields(Options)}
        return tuple(
            f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
            for name, value in given.items()
            if value != defaults[name]
        )

    def one_length(self, default: int) -> int:
        """The context of a task that has only one."""
        if len(self.tokens) > 1:
            raise ConfigError(f"--tokens {self.tokens}: this task reads one length; give it once")
        return self.tokens[0] if self.tokens else default


@dataclass(frozen=True)
class Outcome:
    """What a task found.

    metrics: numbers by name, which become `evaluation/TASK/NAME`; details: all that its picture is drawn
    from, as JSON; settings: what it was measured with; rows: a table below `columns`.
    """

    metrics: Mapping[str, float]
    details: Mapping[str, Any]
    settings: Mapping[str, Any]
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]] = field(default=())


@dataclass(frozen=True)
class Task:
    """A task by name. `function` and `picture` are `module:function`, so that naming one imports nothing.

    function(opened, options, watch) -> Outcome; picture(records, out) -> one path, or those of several
    pictures, or None: see `results.Record`.
    options: those that it reads, besides the seed.
    package: an optional one that it needs, and the extra that installs it.
    """

    name: str
    function: str
    picture: str | None
    options: tuple[str, ...]
    package: tuple[str, str] | None = None

    def require_read(self, options: Options) -> None:
        """ConfigError for a choice that would change nothing: results would be taken for its."""
        ignored = [
            _FLAGS.get(one.name, f"--{one.name.replace('_', '-')}")
            for one in fields(Options)
            if one.name not in ("seed", *self.options) and getattr(options, one.name) != one.default
        ]
        if ignored:
            raise ConfigError(f"--task {self.name} does not read {', '.join(ignored)}; leave it out")

    def run(self, opened: "Pretrained", options: Options, watch: Watch) -> Outcome:
        outcome: Outcome = _named(self.function)(opened, options, watch)
        return outcome

    def draw(self, records: Sequence[Mapping[str, Any]], out: Path) -> list[Path]:
        """The pictures of the records of one task: `out`, and what lies beside it."""
        drawn = _named(self.picture)(records, out) if self.picture is not None else None
        if drawn is None:
            return []
        return [drawn] if isinstance(drawn, Path) else list(drawn)


TASKS = {
    task.name: task
    for task in (
        Task("perplexity", "kvm_dist.evaluate.perplexity:evaluate", None, ("data", "tokens", "limit")),
        Task(
            "position-loss",
            "kvm_dist.evaluate.position_loss:evaluate",
            "kvm_dist.plots.loss_by_position:draw",
            ("data", "tokens", "limit", "block_tokens", "minimum_tokens"),
        ),
        Task(
            "needle",
            "kvm_dist.evaluate.needle_task:evaluate",
            "kvm_dist.plots.needle:draw",
            ("data", "tokens", "haystack", "needles", "depths", "samples"),
        ),
        Task(
            "memory",
            "kvm_dist.evaluate.memory:evaluate",
            "kvm_dist.plots.memory:draw",
            ("data", "tokens", "limit", "haystack", "argument"),
        ),
        Task(
            "lm-eval",
            "kvm_dist.evaluate.lm_eval:evaluate",
            None,
            ("tokens", "limit", "tasks_dir", "shots", "argument"),
            package=("lm_eval", "eval"),
        ),
    )
}


def find_task(text: str) -> tuple[Task, str]:
    """The task and the argument of `TASK` or `TASK:ARGUMENT`.

    Raises ConfigError for an unknown task, with the nearest one, and for one whose package is not installed.
    """
    name, _, argument = text.partition(":")
    if name not in TASKS:
        near = get_close_matches(name, TASKS, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--task {text}: unknown task{meant}; tasks are {', '.join(TASKS)}")
    task = TASKS[name]
    if task.package is not None and importlib.util.find_spec(task.package[0]) is None:
        package, extra = task.package
        raise ConfigError(
            f"--task {text}: needs the package {package}, which is not installed; "
            f"pip install 'kvm-dist[{extra}]'"
        )
    return task, argument


def _named(place: str) -> Any:
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(module), function)
