"""Looking at the memory of every KVM layer while a model reads a document, without changing what it says."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.backbone import Backbone, Block
from models.cache import CachedSequence, read
from models.kvm.chunked import Arguments
from models.kvm.inspection import BlockRead, Folded, inspect_call
from models.kvm.inspection_slots import SlotLives
from models.kvm.layout import KVMSettings
from models.kvm.reference import Parameters
from models.kvm.state import KVMState
from models.layers.attention import QueriesKeysValues
from models.layers.kvm import KVM, merge_gate
from parallel.sequence.context import NoExchange, SequenceContext

PIECE_TOKENS = 512  # at most about as many at once: logits of a large vocabulary are the largest tensor
LEAST_PIECES = 32  # points of what is only seen between two of them


@dataclass
class LayerMemory:
    """All that one layer's memory did and was read for over a document, in order."""

    index: int
    name: str
    settings: KVMSettings
    folds: list[Folded] = field(default_factory=list)
    reads: list[BlockRead] = field(default_factory=list)
    ages: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # of `reads`: see `SlotLives.ages`
    lives: SlotLives = field(default_factory=SlotLives)
    state: KVMState | None = None

    def take(self, step: Folded | BlockRead) -> None:
        if isinstance(step, Folded):
            self.folds.append(step)
            self.lives.fold(step)
        else:
            self.reads.append(step)
            sinks = self.settings.sinks
            nothing = torch.full((len(step.window),), torch.nan, dtype=torch.double)
            self.ages.append(self.lives.ages(step, sinks) if step.block.slots else (nothing, nothing))


@dataclass
class OtherState:
    """How the state of a layer of another kind grows over a document."""

    measure: str
    positions: list[int] = field(default_factory=list)  # tokens read
    values: list[float] = field(default_factory=list)  # mean over heads


@dataclass
class DocumentMemory:
    """What the layers did with one document."""

    tokens: Tensor  # [T] int64
    layers: list[LayerMemory]
    other_states: dict[str, "OtherState"]  # of layers that keep another kind of state, by name


@torch.no_grad()
def read_document(
    model: Backbone, tokens: Tensor, done: Callable[[int], None] = lambda tokens: None
) -> DocumentMemory:
    """Read one document [T] on the model's device, a piece at a time; `done` is told the tokens read."""
    multiple = model.config.position_multiple
    piece = -(-min(PIECE_TOKENS, len(tokens) // LEAST_PIECES or 1) // multiple) * multiple
    cache = CachedSequence()
    others: dict[str, OtherState] = {}
    with watched(model) as layers:
        for start in range(0, len(tokens), piece):
            read(model, tokens[None, start : start + piece], cache)
            for name, measure, value in _other_states(model, cache):
                other = others.setdefault(name, OtherState(measure))
                other.positions.append(cache.start)
                other.values.append(value)
            done(cache.start)
    return DocumentMemory(tokens.cpu(), layers, others)


@contextmanager
def watched(model: Backbone) -> Iterator[list[LayerMemory]]:
    """Records of all KVM layers, which fill while the model reads one sequence."""
    layers, mixers = [], []
    for block in model.layers:
        assert isinstance(block, Block)
        if isinstance(block.mixer, KVM):
            mixers.append(block.mixer)
            layers.append(LayerMemory(block.mixer.index, block.mixer.name, settings_of(block.mixer)))
    try:
        for mixer, layer in zip(mixers, layers, strict=True):
            mixer.__dict__["mix"] = _watching(mixer, layer)  # before the method of its class
        yield layers
    finally:
        for mixer in mixers:
            mixer.__dict__.pop("mix", None)


def settings_of(mixer: KVM) -> KVMSettings:
    config = mixer.config
    return KVMSettings(
        config.budget,
        config.chunk,
        config.window_chunks,
        config.sinks,
        mixer.projections.rotary_dims,
        config.max_slots,
        config.gate_appends,
        config.gate_first_state,
        config.value_radius,
    )


def _watching(mixer: KVM, layer: LayerMemory) -> Callable[[Tensor, Tensor, SequenceContext], Tensor]:
    """`mixer.mix`, which also records what it did."""
    mix = mixer.mix

    def mix_and_record(x: Tensor, first_value: Tensor, context: SequenceContext) -> Tensor:
        state: KVMState | None = context.load(mixer.name)
        found: list[QueriesKeysValues] = []
        hook = mixer.projections.register_forward_hook(lambda module, given, heads: found.append(heads))
        try:
            output = mix(x, first_value, context)
        finally:
            hook.remove()
        (heads,) = found
        parameters = Parameters(
            mixer.state_norm_weight, mixer.state_norm_bias, mixer.state_temperature, mixer.window_temperature
        )
        gate = None if mixer.gate is None else merge_gate(mixer.gate(x))
        with torch.autocast(x.device.type, enabled=False):
            given = Arguments(
                *heads, gate, parameters, layer.settings, state, False, NoExchange(), context.start
            )
            for step in inspect_call(given, output):
                layer.take(step)
        layer.state = context.load(mixer.name)
        return output

    return mix_and_record


def _other_states(model: Backbone, cache: CachedSequence) -> Iterator[tuple[str, str, float]]:
    """Of layers of other kinds: the norm of a recurrent state, or how many centroids there are."""
    for index, kind in enumerate(model.config.layer_kinds):
        name = f"{index}.{kind}"
        state, centroids = (cache.load(f"{name}.{entry}") for entry in ("state", "centroids"))
        if isinstance(state, tuple):
            yield name, "norm of the state", torch.linalg.matrix_norm(state[0].float()).mean().item()
        if isinstance(centroids, tuple):
            yield name, "centroids", float(centroids[0].shape[2])
