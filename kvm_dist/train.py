"""A training run from its configuration to its end, as a table of contents."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvm_dist.agreement import on_rank_zero
from kvm_dist.attempts import current_attempt
from kvm_dist.checkpoint.load import LoadedCheckpoint
from kvm_dist.checkpointing import (
    CheckpointSaver,
    find_checkpoint,
    require_same_data,
    restore_random_state,
    restore_weights,
)
from kvm_dist.config import RunConfig
from kvm_dist.counters import Counters
from kvm_dist.data.first_use import ensure_prepared
from kvm_dist.data.index import DatasetIndex
from kvm_dist.data.tokenizer import build_tokenizer
from kvm_dist.dropped import describe_into
from kvm_dist.evaluate.session import Evaluation
from kvm_dist.exit_codes import ConfigError, CrashError, HangError, Preempted
from kvm_dist.faults import inject_faults
from kvm_dist.hang import declare_hang, hang_behind
from kvm_dist.heartbeat import Heartbeat
from kvm_dist.layout_record import layout_record, note_layout
from kvm_dist.load import LoadedConfig, dump_config
from kvm_dist.metrics import rewind, truncate_after
from kvm_dist.origin import Origin
from kvm_dist.out_of_memory import out_of_memory
from kvm_dist.progress import Progress
from kvm_dist.reporting import Reporter
from kvm_dist.run_directory import RunDirectory
from kvm_dist.run_parts import (
    batch_stream,
    build_engine,
    choose_algorithms,
    compile_kernels,
    new_model,
    sequence_split,
    validation_batches,
)
from kvm_dist.signals import StopRequest
from kvm_dist.step import TrainStep
from kvm_dist.system_metrics import sampled
from kvm_dist.tracking import NullTracker, Tracker
from kvm_dist.trainer import Trainer
from kvm_dist.warm_start import start_weights
from kvm_dist.watchdog import watched
from models.backbone import Backbone
from models.parameter_groups import ParameterGroup
from parallel.engine.deepspeed import Engine
from parallel.mesh import Mesh
from parallel.world import World, join_world, leave_world

_log = logging.getLogger(__name__)


def train(loaded: LoadedConfig) -> None:
    """Train `loaded` to its end on this rank, or go on from its newest checkpoint. Called on every rank."""
    config = loaded.config
    directory = RunDirectory(config.run_directory)
    should_stop = StopRequest().install()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    choose_algorithms(config)  # of the process groups too: NCCL's fastest sums differ from run to run
    world = _join(config)
    try:
        attempt = on_rank_zero(world, lambda: current_attempt(directory.path))
        timeout = config.parallel.timeout_seconds
        with (
            watched(directory, world.rank, world.size, attempt, timeout) as heartbeat,
            sampled(directory.path, _sampling_seconds(config, world)),
        ):
            _train(config, directory, world, should_stop, heartbeat)
    finally:
        leave_world()


def _sampling_seconds(config: RunConfig, world: World) -> float:
    """One rank of each node has the node watched; 0: not this one."""
    tracking = config.tracking
    return tracking.system_metrics_seconds if tracking.enabled and world.local_rank == 0 else 0.0


def _train(
    config: RunConfig, directory: RunDirectory, world: World, should_stop: StopRequest, heartbeat: Heartbeat
) -> None:
    try:
        mesh = Mesh.build(world, config.parallel)
        index = on_rank_zero(world, lambda: ensure_prepared(config.data, config.model.vocab_size))
        checkpoint = find_checkpoint(directory.checkpoints, world)
        model = new_model(config, filled=checkpoint is None)
        origin = None if checkpoint else start_weights(model, config, directory, world)
        _, groups, engine = build_engine(config, world, model)
        inject_faults(directory.path, heartbeat, model)
        if checkpoint:
            require_same_data(checkpoint, index)
            note_layout(checkpoint.state, layout_record(config, world), world)
        counters = restore_weights(checkpoint, engine) if checkpoint else Counters()
        with _tracker(config, directory, world, engine, checkpoint) as tracker:
            parts = (model, groups, engine, tracker, should_stop, counters, heartbeat)
            trainer = _build_trainer(config, directory, mesh, index, *parts)
            announce(world, config, model, engine, checkpoint, origin)
            restore_random_state(checkpoint, config.seed, counters.step, world)
            trainer.run()
            heartbeat.beat("end")
            if world.rank == 0:
                _draw(directory, tracker)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, world.rank) from error
    except (TimeoutError, RuntimeError) as error:
        hang = hang_behind(error, world.rank, config.parallel.timeout_seconds)
        if hang is None:
            raise
        found = declare_hang(directory, heartbeat.attempt, world.size)
        raise HangError(f"{hang}; {found.cause}") from error


def _join(config: RunConfig) -> World:
    try:
        return join_world(config.parallel, config.device, lambda device: compile_kernels(config, device))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except ConnectionError as error:
        raise CrashError(str(error)) from error


def _build_trainer(
    config: RunConfig,
    directory: RunDirectory,
    mesh: Mesh,
    index: DatasetIndex,
    model: Backbone,
    groups: list[ParameterGroup],
    engine: Engine,
    tracker: Tracker,
    should_stop: StopRequest,
    counters: Counters,
    heartbeat: Heartbeat,
) -> Trainer:
    split = sequence_split(config, mesh)
    heartbeat.waited_seconds = lambda: split.waited_seconds
    evaluation = Evaluation(
        config.evaluation,
        engine,
        model,
        validation_batches(config, mesh, index),
        split,
        build_tokenizer(config.data.tokenizer),
        directory,
        config.train.loss_chunk,
    )
    saver = CheckpointSaver(
        directory.checkpoints,
        config.checkpoint,
        engine,
        mesh.world,
        tracker,
        config_text=dump_config(config),
        data_digest=index.digest,
        layout=layout_record(config, mesh.world),
    )
    progress = Progress(config.train.steps, counters.step)
    stream = batch_stream(config, mesh, index, counters)
    return Trainer(
        config,
        TrainStep(config, engine, groups, split, heartbeat.beat),
        iter(stream),
        evaluation,
        saver,
        Reporter(tracker, progress, config.train.log_every_steps),
        should_stop,
        counters,
        heartbeat,
        describe_into(directory.dropped_path, stream, writes=mesh.world.rank == 0),
    )


@contextmanager
def _tracker(
    config: RunConfig,
    directory: RunDirectory,
    world: World,
    engine: Engine,
    checkpoint: LoadedCheckpoint | None,
) -> Iterator[Tracker]:
    """The run in the tracking store, closed with how this attempt ended."""
    if world.rank != 0:
        yield NullTracker()
        return
    if checkpoint is None:
        truncate_after(directory.metrics_path, 0)
    else:
        rewind(directory.metrics_path, checkpoint.step, checkpoint.state["metrics"])
    tags = {f"engine.{key}": str(value) for key, value in engine.describe().items()}
    tracker = Tracker(directory.path, config, tags=tags)
    status = "FAILED"
    try:
        yield tracker
        status = "FINISHED"
    except Preempted:
        status = "KILLED"
        raise
    finally:
        tracker.close(status)


def _draw(directory: RunDirectory, tracker: Tracker) -> None:
    """The run is trained and saved: pictures that cannot be written do not make it fail."""
    from kvm_dist.plots import plot_run  # matplotlib takes a second to import: not before the run is done

    try:
        for picture in plot_run(directory.path):
            tracker.artifact(picture, "plots")
    except OSError as error:
        _log.error(
            "not all pictures were drawn (%s); draw them with: kvm-dist plot %s", error, directory.path
        )


def announce(
    world: World,
    config: RunConfig,
    model: Backbone,
    engine: Engine,
    checkpoint: LoadedCheckpoint | None,
    origin: Origin | None = None,
) -> None:
    if world.rank != 0:
        return
    parameters = sum(parameter.numel() for parameter in model.parameters())
    parallel = config.parallel
    _log.info(
        "%s: %.2fM parameters, layers %s, %d data x %d sequence ranks on %s, ZeRO-%d, %s; %s",
        config.run_directory,
        parameters / 1e6,
        " ".join(config.model.layer_kinds),
        parallel.data,
        parallel.sequence,
        world.device,
        parallel.zero_stage,
        parallel.precision,
        _beginning(checkpoint, origin),
    )
    if parallel.truncate_gradients and parallel.sequence > 1:
        _log.warning(
            "parallel.truncate_gradients: gradients end at the edges between the %d shards of a sequence; "
            "states still cross them, but no rank learns what later ones make of its tokens. Another number "
            "of sequence ranks is another result",
            parallel.sequence,
        )
    _log.info("engine: %s", ", ".join(f"{key} {value}" for key, value in engine.describe().items()))


def _beginning(checkpoint: LoadedCheckpoint | None, origin: Origin | None) -> str:
    if checkpoint is not None:
        return f"goes on from {checkpoint.path.name}"
    if origin is not None:
        return f"starts at step 0 with the weights of {origin.path} (step {origin.step})"
    return "starts at step 0"
