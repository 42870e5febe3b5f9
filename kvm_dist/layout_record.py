"""How a run is laid out, as far as its bits depend on it: saved with a checkpoint, compared at a resume."""

import logging
from collections.abc import Mapping

import torch

from kvm_dist.config import RunConfig
from parallel.world import World

LAYOUT_KEY = "layout"  # in a checkpoint's state
Layout = Mapping[str, float | str]
_log = logging.getLogger(__name__)


def layout_record(config: RunConfig, world: World) -> dict[str, float | str]:
    """Of a joined world. CPU threads count: a sum in other portions is rounded otherwise."""
    parallel = config.parallel
    record: dict[str, float | str] = {
        "parallel.data": parallel.data,
        "parallel.sequence": parallel.sequence,
        "parallel.shards": parallel.shards,
        "parallel.growth_cost": parallel.growth_cost,
        "parallel.head_parallel": parallel.head_parallel,
        "parallel.node_splits": parallel.node_splits,
        "parallel.alternate_chain": parallel.alternate_chain,
        "parallel.two_way_chain": parallel.two_way_chain,
        "parallel.zero_stage": parallel.zero_stage,
        "parallel.bucket_elements": parallel.bucket_elements,
        "train.accumulation": config.train.accumulation,
        "train.loss_chunk": config.train.loss_chunk or "none",
        "device": world.device.type,
        "torch": torch.__version__,
    }
    for kind, layer in config.model.used_layer_configs.items():
        if backend := getattr(layer, "backend", None):
            record[f"model.{kind}.backend"] = backend
    if world.device.type == "cpu":
        record["parallel.threads_per_rank"] = torch.get_num_threads()
    return record


def layout_changes(saved: Layout, now: Layout) -> list[str]:
    """In words, what differs; nothing for a checkpoint that does not say how it was laid out."""
    keys = [key for key in now if key in saved and saved[key] != now[key]]
    return [f"{key} {saved[key]} -> {now[key]}" for key in keys]


def note_layout(state: Mapping[str, object], now: Layout, world: World) -> None:
    """Say on rank 0 that a run does not go on to the same bits, and why."""
    saved = state.get(LAYOUT_KEY)
    changes = layout_changes(saved, now) if isinstance(saved, dict) else []
    if changes and world.rank == 0:
        _log.warning(
            "goes on with another layout (%s): the same batches and the same first loss up to rounding, but "
            "not the same bits",
            ", ".join(changes),
        )
