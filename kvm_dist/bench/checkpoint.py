"""`bench checkpoint`: saves and loads of a run's model, beside what its disk does with plain files."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvm_dist.checkpoint.durable import sync_folder
from kvm_dist.checkpoint.manifest import read_manifest
from kvm_dist.checkpointing import CheckpointSaver, find_checkpoint, load_weights
from kvm_dist.config import CheckpointConfig, RunConfig
from kvm_dist.counters import Counters
from kvm_dist.exit_codes import StorageError
from kvm_dist.load import dump_config
from kvm_dist.plan import make_plan
from kvm_dist.run_parts import build_engine
from kvm_dist.tracking import NullTracker
from parallel.engine.deepspeed import Engine
from parallel.world import World

Report = Callable[[str, float], None]  # what is being done, and the share of the whole that is done

WANTED_SHARE = 0.7  # of the disk's own rates
JUDGED_BYTES = 100 << 20  # of smaller checkpoints files are opened for as long as they are written
_CHUNK = bytes(range(256)) * (16 << 12)  # 16 MiB


@dataclass(frozen=True)
class CheckpointBench:
    """Seconds of every round, in which all take their turn.

    blocking: how long training stands still for a save that goes on beside it; save: until a save is on the
    disk and read back; load: verified and put into the engine. raw_write, raw_read: files of the same sizes,
    written and fsynced, and read again, both without what the system keeps in memory.
    """

    name: str
    folder: str
    bytes: int
    planned_bytes: int
    files: int
    blocking: tuple[float, ...]
    save: tuple[float, ...]
    load: tuple[float, ...]
    raw_write: tuple[float, ...]
    raw_read: tuple[float, ...]

    @property
    def save_share(self) -> float:
        """Of the disk's own rate of writing, median over rounds, each in itself."""
        return median(raw / own for raw, own in zip(self.raw_write, self.save, strict=True))

    @property
    def load_share(self) -> float:
        return median(raw / own for raw, own in zip(self.raw_read, self.load, strict=True))

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"save_share": self.save_share, "load_share": self.load_share}


def bench_checkpoint(
    world: World, config: RunConfig, rounds: int, report: Report = lambda *_: None
) -> CheckpointBench:
    """Save and load `config`'s new model `rounds` times below its run root, which is left as it was."""
    report("making the model", 0.0)
    _, _, engine = build_engine(config, world)
    times: dict[str, list[float]] = {}
    sizes: list[int] = []
    with _scratch(config.run_root) as folder:
        saver = _saver(folder / "checkpoints", config, engine, world)
        for number in range(rounds):
            report(f"round {number + 1} of {rounds}", (number + 0.5) / (rounds + 1))
            for what, seconds in _round(saver, engine, world, number + 1).items():
                times.setdefault(what, []).append(seconds)
            (checkpoint,) = saver.folder.iterdir()
            sizes = [entry.size for entry in read_manifest(checkpoint).files.values()]
            times.setdefault("raw_write", []).append(_write(folder / "raw", sizes))
            times.setdefault("raw_read", []).append(_read(folder / "raw"))
            shutil.rmtree(folder / "raw")
    return CheckpointBench(
        name=config.name,
        folder=str(config.run_root.resolve()),
        bytes=sum(sizes),
        planned_bytes=make_plan(config).checkpoint_bytes,
        files=len(sizes),
        **{what: tuple(seconds) for what, seconds in times.items()},
    )


def _saver(folder: Path, config: RunConfig, engine: Engine, world: World) -> CheckpointSaver:
    """One for all rounds, as in a run: only its first save makes the copy's memory."""
    return CheckpointSaver(
        folder,
        CheckpointConfig(keep=1),
        engine,
        world,
        NullTracker(),
        config_text=dump_config(config),
        data_digest="bench",
    )


def _round(saver: CheckpointSaver, engine: Engine, world: World, step: int) -> dict[str, float]:
    sync_folder(saver.folder.parent)
    begun = time.perf_counter()
    saver.save(Counters(step=step), {}, last=False)
    blocking = time.perf_counter() - begun
    save = saver.finish().get("checkpoint/save_seconds")
    if save is None:
        raise StorageError(f"the save of round {step} failed; the log says why")
    (checkpoint,) = saver.folder.iterdir()
    _forget(checkpoint)
    begun = time.perf_counter()
    found = find_checkpoint(saver.folder, world)
    assert found is not None, "it was just saved"
    load_weights(found, engine)
    return {"blocking": blocking, "save": save, "load": time.perf_counter() - begun}


@contextmanager
def _scratch(run_root: Path) -> Iterator[Path]:
    """A folder on the disk that runs are saved to, gone in the end."""
    made = not run_root.exists()
    try:
        run_root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=run_root) as folder:
            yield Path(folder)
    except OSError as error:
        raise StorageError(
            f"{run_root} cannot be written: {error.strerror or error}; give another place with run_root=PATH"
        ) from error
    finally:
        if made and run_root.exists() and not any(run_root.iterdir()):
            run_root.rmdir()


def _write(folder: Path, sizes: Sequence[int]) -> float:
    """Seconds until files of `sizes` bytes are on the disk."""
    folder.mkdir()
    sync_folder(folder.parent)  # or it waits for the removal of the files before, and so does a save
    begun = time.perf_counter()
    for number, size in enumerate(sizes):
        with open(folder / str(number), "wb", buffering=0) as file:
            for start in range(0, size, len(_CHUNK)):
                file.write(_CHUNK[: size - start])
            os.fsync(file.fileno())
    return time.perf_counter() - begun


def _read(folder: Path) -> float:
    """Seconds to read all files of a folder from the disk."""
    _forget(folder)
    buffer = bytearray(len(_CHUNK))
    begun = time.perf_counter()
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begun


def _forget(folder: Path) -> None:
    """Ask the system to drop what it keeps of these files in memory."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
