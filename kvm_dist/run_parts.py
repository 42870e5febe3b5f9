"""What a training run is put together from, each part from the run's configuration."""

import logging

import torch

from kvm_dist.config import RunConfig
from kvm_dist.counters import Counters
from kvm_dist.data.index import DatasetIndex
from kvm_dist.data.loader import BatchStream
from kvm_dist.data.validation import ValidationBatches
from kvm_dist.sequence_split import SequenceSplit
from models.backbone import Backbone
from models.initialise import initialise
from models.parameter_groups import ParameterGroup, parameter_groups
from models.warm_up import warm_up
from parallel.engine.deepspeed import Engine
from parallel.mesh import Mesh
from parallel.world import World

_log = logging.getLogger(__name__)


def choose_algorithms(config: RunConfig) -> None:
    """Of this process: those that give the same bits every time, if wanted.

    torch would also fill all new memory, against code that reads what nobody wrote: 6 % of a small step, and
    tests show that no layer does.
    """
    torch.use_deterministic_algorithms(config.train.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def compile_kernels(config: RunConfig, device: torch.device) -> None:
    """Of a step on a GPU: with a cold cache it takes minutes, and not equally long on all ranks."""
    if device.type == "cuda":
        warm_up(config.model, device, getattr(torch, config.parallel.precision), _log.info)


def new_model(config: RunConfig, *, filled: bool = True) -> Backbone:
    """As the seed makes it, on the CPU, on every rank alike.

    filled: otherwise its weights are left for those of a checkpoint; filling large ones takes seconds.
    """
    model = Backbone(config.model)
    if filled:
        initialise(model, config.seed)
    return model


def build_engine(
    config: RunConfig, world: World, model: Backbone | None = None
) -> tuple[Backbone, list[ParameterGroup], Engine]:
    """The model (a new one if None), its parameter groups, and the engine that has it from now on."""
    model = new_model(config) if model is None else model
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


def sequence_split(config: RunConfig, mesh: Mesh) -> SequenceSplit:
    parallel = config.parallel
    return SequenceSplit(
        mesh,
        config.shards,
        truncate_gradients=parallel.truncate_gradients,
        head_groups=parallel.head_groups,
        head_parallel=parallel.head_parallel,
        node_splits=parallel.node_splits,
        alternate=parallel.alternate_chain,
        in_two_ways=parallel.two_way_chain,
    )


def batch_stream(config: RunConfig, mesh: Mesh, index: DatasetIndex, counters: Counters) -> BatchStream:
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


def validation_batches(config: RunConfig, mesh: Mesh, index: DatasetIndex) -> ValidationBatches:
    return ValidationBatches(
        index,
        sequence_length=config.data.sequence_length,
        shuffle_tokens=config.data.shuffle_tokens,
        sequences=config.evaluation.validation_sequences,
        data_rank=mesh.data_rank,
        data_size=mesh.data_size,
        damaged_shards_allowed=config.data.damaged_shards_allowed,
    )
