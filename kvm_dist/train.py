"""A training run from its configuration to its end, as a table of contents."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvm_dist.agreement import on_rank_zero
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
from kvm_dist.data.loader import BatchStream
from kvm_dist.data.tokenizer import build_tokenizer
from kvm_dist.data.validation import ValidationBatches
from kvm_dist.evaluate.session import Evaluation
from kvm_dist.exit_codes import ConfigError, CrashError, HangError, Preempted
from kvm_dist.load import LoadedConfig, dump_config
from kvm_dist.metrics import rewind, truncate_after
from kvm_dist.progress import Progress
from kvm_dist.reporting import Reporter
from kvm_dist.run_directory import RunDirectory
from kvm_dist.sequence_split import SequenceSplit
from kvm_dist.signals import StopRequest
from kvm_dist.step import TrainStep
from kvm_dist.tracking import NullTracker, Tracker
from kvm_dist.trainer import Trainer
from models.backbone import Backbone
from models.initialise import initialise
from models.parameter_groups import ParameterGroup, parameter_groups
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
    world = _join(config)
    try:
        torch.use_deterministic_algorithms(config.train.deterministic)
        mesh = Mesh.build(world, config.parallel)
        index = on_rank_zero(world, lambda: ensure_prepared(config.data, config.model.vocab_size))
        model, groups, engine = _build_engine(config, world)
        checkpoint = find_checkpoint(directory.checkpoints, world)
        if checkpoint:
            require_same_data(checkpoint, index)
        counters = restore_weights(checkpoint, engine) if checkpoint else Counters()
        with _tracker(config, directory, world, checkpoint) as tracker:
            trainer = _build_trainer(
                config, directory, mesh, index, model, groups, engine, tracker, should_stop, counters
            )
            _announce(world, config, model, engine, checkpoint)
            restore_random_state(checkpoint, config.seed, counters.step, world)
            trainer.run()
            if world.rank == 0:
                _draw(directory, tracker)
    except (TimeoutError, RuntimeError) as error:
        hang = hang_behind(error, world.rank, config.parallel.timeout_seconds)
        if hang is None:
            raise
        raise hang from error
    finally:
        leave_world()


def hang_behind(error: Exception, rank: int, timeout_seconds: float) -> HangError | None:
    """What to end with if `error` says that another rank was silent; None if it says something else."""
    if isinstance(error, TimeoutError):
        return HangError(str(error))
    if "timed out" not in str(error).lower():
        return None
    return HangError(
        f"rank {rank}: another rank has not joined a collective in {timeout_seconds:g} s "
        "(parallel.timeout_seconds); see the ends of the other ranks' logs"
    )


def _join(config: RunConfig) -> World:
    try:
        return join_world(config.parallel, config.device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except ConnectionError as error:
        raise CrashError(str(error)) from error


def _build_engine(config: RunConfig, world: World) -> tuple[Backbone, list[ParameterGroup], Engine]:
    model = Backbone(config.model)
    initialise(model, config.seed)
    groups = parameter_groups(model)
    parameters = dict(model.named_parameters())
    engine = Engine(
        model,
        [{"params": [parameters[name] for name in g.names], "lr": 0.0, "weight_decay": 0.0} for g in groups],
        config.parallel,
        world,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.eps,
        gradient_clipping=config.optimizer.gradient_clipping,
        accumulation=config.train.accumulation,
        device=world.device,
    )
    return model, groups, engine


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
) -> Trainer:
    split = _sequence_split(config, mesh)
    evaluation = Evaluation(
        config.evaluation,
        engine,
        model,
        _validation_batches(config, mesh, index),
        split,
        build_tokenizer(config.data.tokenizer),
        directory,
    )
    saver = CheckpointSaver(
        directory.checkpoints,
        config.checkpoint.keep,
        engine,
        mesh.world,
        tracker,
        config_text=dump_config(config),
        data_digest=index.digest,
    )
    progress = Progress(config.train.steps, counters.step)
    return Trainer(
        config,
        TrainStep(config, engine, groups, split),
        iter(_batch_stream(config, mesh, index, counters)),
        evaluation,
        saver,
        Reporter(tracker, progress, config.train.log_every_steps),
        should_stop,
        counters,
    )


def _sequence_split(config: RunConfig, mesh: Mesh) -> SequenceSplit:
    try:
        return SequenceSplit(mesh, config.data.sequence_length, config.model.position_multiple)
    except ValueError as error:
        raise ConfigError(f"data.sequence_length: {error}") from error


def _batch_stream(config: RunConfig, mesh: Mesh, index: DatasetIndex, counters: Counters) -> BatchStream:
    return BatchStream(
        index,
        sequence_length=config.data.sequence_length,
        shuffle_tokens=config.data.shuffle_tokens,
        seed=config.seed,
        batch_sequences=config.train.batch_sequences,
        accumulation=config.train.accumulation,
        data_rank=mesh.data_rank,
        data_size=mesh.data_size,
        start_position=counters.position,
        workers=config.data.workers,
        damaged_shards_allowed=config.data.damaged_shards_allowed,
        damaged=counters.damaged,
    )


def _validation_batches(config: RunConfig, mesh: Mesh, index: DatasetIndex) -> ValidationBatches:
    return ValidationBatches(
        index,
        sequence_length=config.data.sequence_length,
        shuffle_tokens=config.data.shuffle_tokens,
        sequences=config.evaluation.validation_sequences,
        data_rank=mesh.data_rank,
        data_size=mesh.data_size,
        damaged_shards_allowed=config.data.damaged_shards_allowed,
    )


@contextmanager
def _tracker(
    config: RunConfig, directory: RunDirectory, world: World, checkpoint: LoadedCheckpoint | None
) -> Iterator[Tracker]:
    """The run in the tracking store, closed with how this attempt ended."""
    if world.rank != 0:
        yield NullTracker()
        return
    if checkpoint is None:
        truncate_after(directory.metrics_path, 0)
    else:
        rewind(directory.metrics_path, checkpoint.step, checkpoint.state["metrics"])
    tracker = Tracker(directory.path, config)
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


def _announce(
    world: World, config: RunConfig, model: Backbone, engine: Engine, checkpoint: LoadedCheckpoint | None
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
        f"goes on from {checkpoint.path.name}" if checkpoint else "starts at step 0",
    )
    _log.info("engine: %s", ", ".join(f"{key} {value}" for key, value in engine.describe().items()))
