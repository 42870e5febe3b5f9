"""Batches that a run could not learn from: what they were cut from, in words and in a file."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from kvm_dist.data.loader import BatchStream, StepBatch
from kvm_dist.data.sources import in_words
from kvm_dist.exit_codes import DataError, NotFinite
from kvm_dist.metrics import append_line

Described = Callable[[int, StepBatch, NotFinite], str]


def describe_into(path: Path, stream: BatchStream, writes: bool) -> Described:
    """A function that names the data of a step; the rank that `writes` adds a line with all of it to `path`.

    It is called on the way to an error of its own: what keeps it from telling is told instead.
    """

    def describe(step: int, batch: StepBatch, error: NotFinite) -> str:
        try:
            sources = stream.sources(batch)
        except DataError as problem:
            return f"The data of this step cannot be told: {problem}"
        said = f"The data of this step: {in_words(sources)}"
        if not writes:
            return f"{said} (in full: {path})"
        record = {
            "step": step,
            "cause": str(error),
            "sequences": {str(position): list(map(asdict, parts)) for position, parts in sources.items()},
        }
        try:
            append_line(path, record)
        except OSError as problem:
            return f"{said} ({path} was not written: {problem})"
        return f"{said} (in full: {path})"

    return describe
