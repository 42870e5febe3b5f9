"""Values separated by commas: one run for every combination."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvm_dist.exit_codes import ConfigError
from kvm_dist.load import LoadedConfig, load_config

MOST_RUNS = 1000
_LONGEST_NAME = 120
_OPENING, _CLOSING = "[{(", "]})"


@dataclass(frozen=True)
class Sweep:
    """Runs that are submitted together; a single run is a sweep of one.

    folder: where their jobs leave what belongs to all: the run directory itself for a single run.
    choices: the keys that vary, and the values of each as written.
    """

    name: str
    folder: Path
    runs: tuple[LoadedConfig, ...]
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)


def load_sweep(config: Path, overrides: Sequence[str]) -> Sweep:
    """All runs of `config`, checked; raises ConfigError for the first that is wrong."""
    choices = [split_values(text) for text in overrides]
    count = 1
    for values in choices:
        count *= len(values)
    if count == 1:
        loaded = load_config(config, overrides)
        return Sweep(loaded.config.name, loaded.config.run_directory, (loaded,))
    if count > MOST_RUNS:
        raise ConfigError(f"{count} combinations; wanted {MOST_RUNS} at most: leave out some values")
    base = load_config(config, [values[0] for values in choices]).config
    varied = {
        values[0].partition("=")[0]: [text.partition("=")[2] for text in values]
        for values in choices
        if len(values) > 1
    }
    _refuse_keys_that_all_share(varied)
    runs = []
    for number, combination in enumerate(itertools.product(*choices)):
        chosen = [text for text, values in zip(combination, choices, strict=True) if len(values) > 1]
        place = [f"run_root={base.run_directory}", f"name={member_name(number, chosen)}"]
        runs.append(load_config(config, [*combination, *place, f"tracking.uri={base.tracking_uri}"]))
    return Sweep(base.name, base.run_directory, tuple(runs), varied)


def split_values(override: str) -> list[str]:
    """`a=1,2` -> `a=1`, `a=2`. Commas in brackets, braces and quotes belong to one value."""
    key, equals, text = override.partition("=")
    return [f"{key}{equals}{value}" for value in _outer_parts(text)]


def member_name(number: int, chosen: Sequence[str]) -> str:
    """`003-learning_rate-1e-3`: a number of its own, and what sets this run apart."""
    parts = []
    for text in chosen:
        key, _, value = text.partition("=")
        parts.append(f"{key.rpartition('.')[2]}-{value}")
    words = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts)).strip("_")
    return f"{number:03d}-{words}"[:_LONGEST_NAME]


def _outer_parts(text: str) -> Iterator[str]:
    depth, quote, begin = 0, "", 0
    for position, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[begin:position]
            begin = position + 1
    yield text[begin:]


def _refuse_keys_that_all_share(varied: Iterable[str]) -> None:
    for key in varied:
        if key in ("name", "run_root") or key.partition(".")[0] in ("slurm", "tracking", "parallel"):
            raise ConfigError(
                f"{key}: the runs of a sweep share one job's shape and place; give it one value (put quotes "
                'around a value with a comma: "a,b")'
            )
