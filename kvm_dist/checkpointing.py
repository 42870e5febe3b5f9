"""Checkpoints as the trainer uses them: all ranks save one step, all ranks resume from one."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from kvm_dist.agreement import on_rank_zero
from kvm_dist.checkpoint import newest_valid, prune
from kvm_dist.checkpoint.load import LoadedCheckpoint, load_checkpoint
from kvm_dist.checkpoint.rng import capture_rng, restore_rng, seed_rng
from kvm_dist.checkpoint.save import save_checkpoint
from kvm_dist.counters import Counters
from kvm_dist.data.index import DatasetIndex
from kvm_dist.exit_codes import DataError, StorageError
from kvm_dist.tracking import Tracker
from parallel import collectives
from parallel.engine.deepspeed import Engine
from parallel.world import World

_log = logging.getLogger(__name__)


class CheckpointSaver:
    """Saves the engine's state under `folder` and keeps the newest `keep`."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        engine: Engine,
        world: World,
        tracker: Tracker,
        *,
        config_text: str,
        data_digest: str,
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.engine = engine
        self.world = world
        self.tracker = tracker
        self.config_text = config_text
        self.data_digest = data_digest

    def save(self, counters: Counters, metrics: Mapping[str, float], final: bool) -> dict[str, float]:
        """Collective. A save that fails leaves the older ones and raises only if it was the final one.

        The step's metrics are saved too: a run killed before they are logged still gets them at its resume.
        """
        begun = time.perf_counter()
        problem = self._write(counters, metrics)
        problem = collectives.broadcast_object(problem)
        if problem is not None and final:
            raise StorageError(problem)
        if problem is not None:
            _log.error("step %d was not saved, training goes on: %s", counters.step, problem)
            return {}
        return {"checkpoint/save_seconds": time.perf_counter() - begun}

    def _write(self, counters: Counters, metrics: Mapping[str, float]) -> str | None:
        """Rank 0 writes what all ranks produce; returns what went wrong."""
        rng_states = collectives.gather_objects(capture_rng(self.world.device))
        try:
            saved = save_checkpoint(
                self.folder,
                counters.step,
                _weights_and_optimizer(self.engine),
                rng_states=rng_states,
                state={**counters.to_dict(), "metrics": dict(metrics), "data_digest": self.data_digest},
                config_text=self.config_text,
                write=self.world.rank == 0,
            )
        except StorageError as error:
            return str(error)
        if saved is not None:
            prune(self.folder, self.keep, verified=saved.path)
            self.tracker.checkpoint(saved.path, counters.step)
        return None


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


def restore_weights(checkpoint: LoadedCheckpoint, engine: Engine) -> Counters:
    """Put parameters, masters and moments back, at any layout. Collective."""
    engine.load_named_tensors(_getter(checkpoint))
    return Counters.from_dict(checkpoint.state).after_restart()


def restore_random_state(checkpoint: LoadedCheckpoint | None, seed: int, step: int, world: World) -> None:
    """Call it last before the first step. A rank without saved state gets a stream of its own."""
    state = checkpoint.rng(world.rank) if checkpoint else None
    if state is None:
        seed_rng(seed, world.rank, step, world.device)
    else:
        restore_rng(state, world.device)


def _weights_and_optimizer(engine: Engine) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    for name, tensors in engine.named_tensors():
        kinds = dict(tensors)
        yield name, {"weight": kinds.pop("parameter"), **kinds}


def _getter(checkpoint: LoadedCheckpoint) -> Callable[[str], dict[str, Tensor]]:
    def tensors(name: str) -> dict[str, Tensor]:
        kinds = {kind: checkpoint.tensor(name, kind) for kind in ("master", "exp_avg", "exp_avg_sq", "step")}
        return {"parameter": checkpoint.tensor(name), **kinds}

    return tensors
