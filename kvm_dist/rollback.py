"""Back to the newest checkpoint without leaving the process, for batches that a run is better without."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvm_dist.checkpointing import CheckpointSaver, find_checkpoint, load_weights, restore_random_state
from kvm_dist.counters import Counters
from kvm_dist.exit_codes import NotFinite
from kvm_dist.metrics import rewind
from kvm_dist.run_directory import RunDirectory


@dataclass(frozen=True)
class Return:
    """Where a run is after it went back: what the checkpoint says of its progress and its step's metrics."""

    counters: Counters
    metrics: Mapping[str, float]


def roll_back(saver: CheckpointSaver, seed: int) -> Return:
    """Parameters, moments and random state of all ranks as the newest checkpoint has them. Collective.

    Metrics of later steps are taken out of `metrics.jsonl`: those steps will be taken again, with other
    batches. A tracking store keeps the values that it has of them, and gets the new ones as later ones.

    Raises NotFinite if nothing was saved yet.
    """
    saver.finish()
    checkpoint = find_checkpoint(saver.folder, saver.world)
    if checkpoint is None:
        raise NotFinite("there is no checkpoint to go back to yet")
    load_weights(checkpoint, saver.engine)
    restore_random_state(checkpoint, seed, checkpoint.step, saver.world)
    metrics = checkpoint.state["metrics"]
    if saver.world.rank == 0:
        rewind(RunDirectory(saver.folder.parent).metrics_path, checkpoint.step, metrics)
    return Return(Counters.from_dict(checkpoint.state), metrics)
