"""Text to shards: in parallel, resumable, nothing ever half there under its final name. No torch."""

import json
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

from kvm_dist.data.documents import PYTHON_STDLIB, find_pieces
from kvm_dist.data.files import locked, replacing
from kvm_dist.data.index import INDEX_NAME, VERSION, DatasetIndex, load_index, write_index
from kvm_dist.data.progress import Progress, show_progress
from kvm_dist.data.tokenizer import Tokenizer, build_tokenizer
from kvm_dist.data.units import (
    HASH_RANGE,
    SCRATCH,
    Unit,
    UnitRecord,
    default_unit_bytes,
    group_pieces,
    read_record,
    tokenise_unit,
)
from kvm_dist.exit_codes import ConfigError, DataError, RunError, StorageError

SHARD_TOKENS = 8_000_000
IN_PROCESS_BYTES = 4 << 20  # below this, starting processes takes longer than the work
_SHARD_NAME = re.compile(r"^(train|validation)-[0-9]{5,}-[0-9]{3,}\.tar$")


@dataclass(frozen=True)
class _Settings:
    """What the content of a dataset depends on beside its inputs."""

    source: str
    tokenizer: str
    fingerprint: str
    validation_fraction: float
    shard_tokens: int
    version: int = VERSION


@dataclass(frozen=True)
class _Job:
    """What every process needs to tokenise units."""

    out: Path
    tokenizer: str
    shard_tokens: int
    workers: int


def prepare(
    source: str | Path,
    out: str | Path,
    tokenizer_name: str = "bytes",
    *,
    validation_fraction: float = 0.05,
    shard_tokens: int = SHARD_TOKENS,
    unit_bytes: int | None = None,
    workers: int | None = None,
    progress: bool = True,
    wait: bool = False,
) -> DatasetIndex:
    """Tokenise `source` into WebDataset shards with an index in `out`.

    Args:
        source: A text file, a folder, `.jsonl[.gz|.zst]` with a "text" key, `.npy` token ids, or
            "python-stdlib".
        tokenizer_name: `bytes`, `rwkv-world`, or a Hugging Face tokenizer folder or name.
        validation_fraction: Share of documents held out, decided by a hash of their content; at least one.
        shard_tokens: Most tokens of a shard, unless one document is longer.
        unit_bytes: Source bytes that one process tokenises at a time; null: about 1/32 of the source.
        workers: Processes; null: one a core. The result does not depend on it.
        wait: If another process prepares `out`, wait for it and take its result; otherwise that is an error.

    Called again after an interruption it goes on; finished parts whose inputs are unchanged are kept.
    Raises ConfigError for settings other than those that `out` was prepared with, DataError for bad input,
    StorageError if `out` cannot be written.
    """
    target = Path(out)
    if not 0 < validation_fraction < 1:
        raise ConfigError(
            f"validation_fraction={validation_fraction}, wanted a number between 0 and 1, such as 0.05"
        )
    tokenizer = build_tokenizer(tokenizer_name)
    name = str(source) if str(source) == PYTHON_STDLIB else str(Path(source).resolve())
    settings = _Settings(name, tokenizer.name, tokenizer.fingerprint, validation_fraction, shard_tokens)
    job = _Job(target, tokenizer_name, shard_tokens, workers or os.cpu_count() or 1)
    try:
        (target / SCRATCH).mkdir(parents=True, exist_ok=True)
        with locked(target / SCRATCH / "lock", wait):
            if wait and (target / INDEX_NAME).is_file():
                return load_index(target)
            units = _units(settings.source, target, unit_bytes)
            _claim(target, settings)
            records = _records(units, job, tokenizer, validation_fraction, progress)
            _finish(target, tokenizer, records, progress)
    except BlockingIOError as error:
        raise ConfigError(
            f"another process is preparing {target}; wait for it or choose another folder"
        ) from error
    except OSError as error:
        raise StorageError(f"preparing {source} into {target}: {error}") from error
    return load_index(target)


def _claim(out: Path, settings: _Settings) -> None:
    """Remember the settings, refuse others once a unit is done, sweep what a killed process left."""
    path = out / SCRATCH / "settings.json"
    for leftover in (out / SCRATCH).glob("*.tmp"):
        leftover.unlink(missing_ok=True)
    wanted = asdict(settings)
    if not path.is_file() or not any((out / SCRATCH).glob("unit-*.json")):
        with replacing(path, out / SCRATCH) as file:
            file.write(json.dumps(wanted, indent=1).encode())
        return
    held = json.loads(path.read_bytes())
    different = [
        f"{key} (there {held.get(key)!r}, now {wanted[key]!r})"
        for key in wanted
        if held.get(key) != wanted[key]
    ]
    if different:
        raise ConfigError(
            f"{out} was prepared with another {', '.join(different)}; "
            "choose another folder or delete this one"
        )


def _units(source: str, out: Path, unit_bytes: int | None) -> list[Unit]:
    inside = out.resolve()
    if source != PYTHON_STDLIB and Path(source).is_relative_to(inside):
        raise ConfigError(
            f"the source {source} lies in {out}, where the shards go; choose another folder for them"
        )
    pieces = [piece for piece in find_pieces(source) if not piece.path.resolve().is_relative_to(inside)]
    return group_pieces(pieces, unit_bytes or default_unit_bytes(pieces))


def _records(
    units: Sequence[Unit], job: _Job, tokenizer: Tokenizer, fraction: float, progress: bool
) -> list[UnitRecord]:
    """Tokenise what is not done. Both splits get a document: the threshold gives way if it has to."""
    base = round(fraction * HASH_RANGE)
    records = {unit.number: record for unit in units if (record := read_record(unit, job.out))}
    missing = [unit for unit in units if unit.number not in records]
    records |= _tokenise(missing, job, tokenizer, base, progress)
    spans = [record.hashes for record in records.values() if record.hashes]
    smallest = min((low for low, _ in spans), default=0)
    largest = max((high for _, high in spans), default=0)
    if smallest == largest:
        raise DataError(
            f"the source holds {'one document' if spans else 'no text'}; training and validation need "
            "at least two different documents (files, or lines of a .jsonl file)"
        )
    threshold = min(max(base, smallest + 1), largest)
    divided = [unit for unit in units if not records[unit.number].splits_alike(threshold)]
    records |= _tokenise(divided, job, tokenizer, threshold, progress)
    return [records[unit.number] for unit in units]


def _tokenise(
    units: Sequence[Unit], job: _Job, tokenizer: Tokenizer, threshold: int, progress: bool
) -> dict[int, UnitRecord]:
    """Records of `units`, made by as many processes as are worth starting."""
    if not units:
        return {}
    # From here on shards are replaced: an older index must not vouch for them.
    (job.out / INDEX_NAME).unlink(missing_ok=True)
    total = sum(unit.work_bytes for unit in units)
    records: dict[int, UnitRecord] = {}
    with show_progress(f"preparing {job.out}", total, silent=not progress) as shown:
        if min(job.workers, len(units)) == 1 or total < IN_PROCESS_BYTES:
            for unit in units:
                records[unit.number] = tokenise_unit(unit, job.out, tokenizer, threshold, job.shard_tokens)
                shown.advance(unit.work_bytes)
        else:
            records |= _tokenise_in_processes(units, job, threshold, shown)
    return records


def _tokenise_in_processes(
    units: Sequence[Unit], job: _Job, threshold: int, shown: Progress
) -> dict[int, UnitRecord]:
    records: dict[int, UnitRecord] = {}
    pool = ProcessPoolExecutor(
        min(job.workers, len(units)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(job.tokenizer,),
    )
    with pool:
        waiting = {
            pool.submit(_tokenise_in_worker, unit, job.out, threshold, job.shard_tokens): unit
            for unit in units
        }
        try:
            for finished in as_completed(waiting):
                unit = waiting[finished]
                records[unit.number] = finished.result()
                shown.advance(unit.work_bytes)
        except BrokenProcessPool as error:
            raise RunError(
                "a preparing process was killed, perhaps for lack of memory; run the same command again to "
                "go on, with fewer workers if it was memory"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return records


_worker_tokenizer: Tokenizer | None = None


def _start_worker(tokenizer_name: str) -> None:
    global _worker_tokenizer
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _worker_tokenizer = build_tokenizer(tokenizer_name)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's processes do not notice that their parent was killed: end instead of waiting for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _tokenise_in_worker(unit: Unit, out: Path, threshold: int, shard_tokens: int) -> UnitRecord:
    assert _worker_tokenizer is not None, "the pool ran its initializer"
    return tokenise_unit(unit, out, _worker_tokenizer, threshold, shard_tokens)


def _finish(out: Path, tokenizer: Tokenizer, records: Sequence[UnitRecord], progress: bool) -> None:
    """Write the index and remove shards and records of units that are no more."""
    shards = [shard for record in records for shard in record.shards]
    write_index(out, out / SCRATCH, tokenizer, shards)
    kept = {shard.name for shard in shards} | {f"unit-{number:05d}.json" for number in range(len(records))}
    for path in [*out.iterdir(), *(out / SCRATCH).glob("unit-*.json")]:
        if path.name not in kept and (_SHARD_NAME.match(path.name) or path.name.startswith("unit-")):
            path.unlink()
    skipped = sum(record.skipped for record in records)
    if progress and skipped:
        print(f"left out {skipped} files that are empty or not text", file=sys.stderr)
