"""`bench data`: how fast text becomes shards, and shards become batches, on this machine."""

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvm_dist.data.check import check
from kvm_dist.data.index import DatasetIndex
from kvm_dist.data.loader import BatchStream
from kvm_dist.data.prepare import prepare

Report = Callable[[str, float], None]  # what is being done, and the share of the whole that is done

BATCH_SEQUENCES = 8
TURNS = 9  # where there is more than one core
FAR = 1_000_003  # sequences consumed before a stream that starts anywhere


@dataclass(frozen=True)
class Turn:
    """One thing done once. tokens: of how many tokens; bytes: of how many bytes of shards."""

    what: str
    seconds: float
    tokens: int
    bytes: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class DataBench:
    source: str
    tokenizer: str
    sequence_length: int
    shards: int
    tokens: int
    bytes: int
    turns: tuple[Turn, ...]

    def as_json(self) -> dict[str, Any]:
        rates = [asdict(turn) | {"tokens_per_second": turn.tokens_per_second} for turn in self.turns]
        return asdict(self) | {"turns": rates}


def bench_data(
    source: str,
    tokenizer: str,
    sequence_length: int,
    batches: int,
    report: Report = lambda *_: None,
) -> DataBench:
    """Prepare `source` in a temporary folder, check it and read `batches` batches of it."""
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="kvm-dist-bench-") as folder:
        turns: list[Turn] = []
        index: DatasetIndex | None = None
        for workers in dict.fromkeys((1, cores)):
            report(f"preparing with {workers} processes", len(turns) / TURNS)
            shutil.rmtree(Path(folder) / "data", ignore_errors=True)
            begun = time.perf_counter()
            index = prepare(source, Path(folder) / "data", tokenizer, workers=workers, progress=False)
            turns.append(_turn(f"prepare, processes: {workers}", begun, index))
        assert index is not None, "a machine has a core"
        for turn in _reading(index, sequence_length, batches):
            turns.append(turn)
            report(turn.what, min(len(turns) / TURNS, 1.0))
        return DataBench(
            source=source,
            tokenizer=tokenizer,
            sequence_length=sequence_length,
            shards=len(index.shards),
            tokens=sum(shard.tokens for shard in index.shards),
            bytes=sum(shard.bytes for shard in index.shards),
            turns=tuple(turns),
        )


def _reading(index: DatasetIndex, sequence_length: int, batches: int) -> Iterator[Turn]:
    begun = time.perf_counter()
    for shard in index.shards:
        (index.directory / shard.name).read_bytes()
    yield _turn("read the files, no more", begun, index)
    begun = time.perf_counter()
    check(index.directory, progress=False)
    yield _turn("check every sample", begun, index)
    for workers in (0, 1):
        steps = iter(_stream(index, sequence_length, workers))
        begun = time.perf_counter()
        next(steps)
        yield _batches(f"first batch, loader processes: {workers}", begun, 1, sequence_length)
        begun = time.perf_counter()
        for _ in itertools.islice(steps, batches):
            pass
        yield _batches(f"batches after it, loader processes: {workers}", begun, batches, sequence_length)
    begun = time.perf_counter()
    next(iter(_stream(index, sequence_length, 0, start=FAR)))
    yield _batches(f"first batch of a resume at sequence {FAR:,}", begun, 1, sequence_length)


def _stream(index: DatasetIndex, sequence_length: int, workers: int, start: int = 0) -> BatchStream:
    return BatchStream(
        index,
        sequence_length=sequence_length,
        shuffle_tokens=32_000_000,
        seed=0,
        batch_sequences=BATCH_SEQUENCES,
        start_position=start,
        workers=workers,
    )


def _turn(what: str, begun: float, index: DatasetIndex) -> Turn:
    seconds = time.perf_counter() - begun
    sizes = [(shard.tokens, shard.bytes) for shard in index.shards]
    return Turn(what, seconds, *(sum(column) for column in zip(*sizes, strict=True)))


def _batches(what: str, begun: float, batches: int, sequence_length: int) -> Turn:
    tokens = batches * BATCH_SEQUENCES * sequence_length
    return Turn(what, time.perf_counter() - begun, tokens, 0)
