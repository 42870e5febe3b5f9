"""Checkpoints as the trainer uses them: all ranks save one step, all ranks resume from one."""

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from kvm_dist.agreement import on_rank_zero
from kvm_dist.checkpoint import CheckpointInfo, newest_valid, prune
from kvm_dist.checkpoint.background import Background
from kvm_dist.checkpoint.layout import FileLayout, lay_out
from kvm_dist.checkpoint.load import LoadedCheckpoint, load_checkpoint
from kvm_dist.checkpoint.parts import Piece, write_share
from kvm_dist.checkpoint.rng import capture_rng, restore_rng, rng_contents, seed_rng
from kvm_dist.checkpoint.save import GIBIBYTE, Draft, begin_save, finish_save, state_text
from kvm_dist.checkpoint.snapshot import Snapshot, TakenTensors, owned_pieces, step_pieces, tensor_layouts
from kvm_dist.config import CheckpointConfig
from kvm_dist.counters import Counters
from kvm_dist.data.index import DatasetIndex
from kvm_dist.exit_codes import DataError, StorageError
from kvm_dist.layout_record import LAYOUT_KEY, Layout
from kvm_dist.tracking import Tracker
from parallel import collectives
from parallel.engine.deepspeed import Engine
from parallel.world import World

_log = logging.getLogger(__name__)


class CheckpointSaver:
    """Saves the engine's state under `folder` and keeps the newest `keep`.

    Each rank copies what it owns at the step boundary and writes the copy beside the steps that follow. One
    save at a time: the next one waits for it. The ranks tell each other through files, not messages.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        engine: Engine,
        world: World,
        tracker: Tracker,
        *,
        config_text: str,
        data_digest: str,
        layout: Layout = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        self.config = config
        self.engine = engine
        self.world = world
        self.tracker = tracker
        self.config_text = config_text
        self.data_digest = data_digest
        self.layout = layout
        self._snapshot = Snapshot()
        self._snapshot.reserve(engine.owned_tensors())
        self._background: Background[tuple[CheckpointInfo, float] | None] = Background()
        self._step = 0
        self._begun = 0.0
        self._failed = 0  # saves of this attempt

    def save(self, counters: Counters, metrics: Mapping[str, float], last: bool) -> dict[str, float]:
        """Collective. A save that fails leaves the older ones; it raises only if it was the attempt's last.

        The last one is on the disk when this returns. The step's metrics are saved too: a run killed before
        they are logged still gets them at its resume. Returns how long the step was held up, and what
        `settle` says.
        """
        begun = time.perf_counter()
        measured = self._settle()
        self._step, self._begun = counters.step, begun
        owned = self.engine.owned_tensors()
        specs, rng = rng_contents(collectives.gather_objects(capture_rng(self.world.device)))
        layouts = tensor_layouts(owned) + lay_out("rng", specs, GIBIBYTE)
        draft, problem = self._begin(counters, metrics, layouts)
        folder, problem = collectives.broadcast_object((draft.partial if draft else None, problem))
        if folder is not None:
            taken = self._snapshot.take(owned)
            shared = [*step_pieces(owned, self.engine.adam_step()), *rng] if self.world.rank == 0 else []
            self._background.start(functools.partial(self._write, draft, folder, layouts, taken, shared))
            if last or not self.config.asynchronous:
                problem, seconds = self._wait()
                measured |= seconds
        if problem is not None and last:
            raise StorageError(problem)
        self._report(problem)
        blocking = time.perf_counter() - begun
        step_seconds = metrics.get("perf/step_seconds", 0.0)
        measured["checkpoint/failed_saves"] = float(self._failed)
        measured["checkpoint/blocking_seconds"] = blocking
        if step_seconds:
            measured["checkpoint/blocking_share"] = blocking / step_seconds
        return measured

    def settle(self) -> dict[str, float]:
        """Tells of a save that has finished in the meantime; waits for nothing, and no other rank."""
        return self._settle() if self._background.finished else {}

    def finish(self) -> dict[str, float]:
        """Waits for the save under way, as before an end that all ranks come to; what `settle` says."""
        return self._settle()

    def _begin(
        self, counters: Counters, metrics: Mapping[str, float], layouts: Sequence[FileLayout]
    ) -> tuple[Draft | None, str | None]:
        """Rank 0 makes room; what it says goes to all ranks."""
        if self.world.rank != 0:
            return None, None
        state = {**counters.to_dict(), "metrics": dict(metrics), "data_digest": self.data_digest}
        state[LAYOUT_KEY] = dict(self.layout)
        texts = {"state.json": state_text(state, counters.step), "config.yaml": self.config_text}
        try:
            return begin_save(self.folder, counters.step, layouts, texts), None
        except StorageError as error:
            return None, str(error)

    def _write(
        self,
        draft: Draft | None,
        partial: Path,
        layouts: Sequence[FileLayout],
        taken: TakenTensors,
        shared: Sequence[Piece],
    ) -> tuple[CheckpointInfo, float] | None:
        """In the background, on every rank; rank 0, which has the draft, gets the checkpoint and its time.

        The time is until the save is in place: what the older ones take to remove is not of it.
        """
        pieces = [*owned_pieces(taken), *shared]
        if draft is None:
            write_share(partial, layouts, pieces, self.world.rank)
            return None
        with ThreadPoolExecutor(1) as beside:  # what is written is read back while it is synced
            share = beside.submit(write_share, partial, layouts, pieces, self.world.rank)
            try:
                saved = finish_save(draft, self.world.size)
            finally:
                share.result()
        seconds = time.perf_counter() - self._begun
        prune(self.folder, self.config.keep, verified=saved.path)
        return saved, seconds

    def _wait(self) -> tuple[str | None, dict[str, float]]:
        """Collective: the save that was just begun, to its end on all ranks."""
        saved, error = self._background.collect()
        problem: str | None = collectives.broadcast_object(str(error) if error else None)
        return problem, self._account(saved)

    def _settle(self) -> dict[str, float]:
        saved, error = self._background.collect()
        self._report(str(error) if error else None)
        return self._account(saved) | ({"checkpoint/failed_saves": float(self._failed)} if error else {})

    def _account(self, saved: tuple[CheckpointInfo, float] | None) -> dict[str, float]:
        if saved is None:
            return {}
        checkpoint, seconds = saved
        self.tracker.checkpoint(checkpoint.path, checkpoint.step)
        return {"checkpoint/save_seconds": seconds}

    def _report(self, problem: str | None) -> None:
        if problem is not None:
            self._failed += 1
            _log.error("step %d was not saved, training goes on: %s", self._step, problem)


def find_checkpoint(folder: Path, world: World) -> LoadedCheckpoint | None:
    """The newest checkpoint of which every byte is as saved, the same on all ranks; None when there is none.

    Raises StorageError on all ranks if there are checkpoints and none is valid.
    """

    def newest_path() -> Path | None:
        newest = newest_valid(folder)
        return newest.path if newest else None

    path = on_rank_zero(world, newest_path)
    return load_checkpoint(path, verify=False) if path else None


def require_same_data(checkpoint: LoadedCheckpoint, index: DatasetIndex) -> None:
    """The position of a checkpoint means something in its own data only."""
    saved = checkpoint.state["data_digest"]
    if saved != index.digest:
        raise DataError(
            f"{checkpoint.path} was trained on data with digest {saved[:16]}, but {index.directory} has "
            f"{index.digest[:16]}; give the run its own data back, or choose another name for the new data"
        )


def load_weights(checkpoint: LoadedCheckpoint, engine: Engine) -> None:
    """Put parameters, masters and moments back, at any layout. Collective."""
    engine.load_named_tensors(_getter(checkpoint))


def restore_weights(checkpoint: LoadedCheckpoint, engine: Engine) -> Counters:
    """`load_weights` at a start; how far the run had come. Collective."""
    load_weights(checkpoint, engine)
    return Counters.from_dict(checkpoint.state).after_restart()


def restore_random_state(checkpoint: LoadedCheckpoint | None, seed: int, step: int, world: World) -> None:
    """Call it last before the first step. A rank without saved state gets a stream of its own."""
    state = checkpoint.rng(world.rank) if checkpoint else None
    if state is None:
        seed_rng(seed, world.rank, step, world.device)
    else:
        restore_rng(state, world.device)


def _getter(checkpoint: LoadedCheckpoint) -> Callable[[str], dict[str, Tensor]]:
    def tensors(name: str) -> dict[str, Tensor]:
        kinds = {kind: checkpoint.tensor(name, kind) for kind in ("master", "exp_avg", "exp_avg_sq", "step")}
        return {"parameter": checkpoint.tensor(name), **kinds}

    return tensors
