"""What the recurrences of flash-linear-attention share: convolved projections, the state's relay, output."""

from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.initialise import linear_default_
from models.kinds.recurrence import TAPS, RecurrenceConfig
from models.layers import chunk_recurrence
from models.layers.chunk_recurrence import ChunkMaps
from models.layers.mixer import Mixer, settings
from models.layers.segment import segment
from models.layers.short_convolution import ShortConvolution
from models.precision import without_autocast
from parallel.sequence.context import SequenceContext


class Operands(NamedTuple):
    """What a recurrence is given. Queries come scaled, log decays in float32 at least."""

    query: Tensor  # [B, T, H or groups, K]
    key: Tensor  # [B, T, H or groups, K]
    value: Tensor  # [B, T, H, V]
    log_decay: Tensor  # [B, T, H, K or 1]
    rate: Tensor | None = None  # [B, T, H, 1], of the delta rule
    skip: tuple[Tensor, ...] = ()  # [B, T, H, V], added to what is read


class Recurrence(Mixer):
    """Reads and writes a state [K, V] per head. A subclass says what controls it and how it is read out."""

    def __init__(self, model: ModelConfig, index: int, convolution_bias: bool = False) -> None:
        super().__init__(model, index)
        self.config: RecurrenceConfig = settings(model, index, RecurrenceConfig)
        self.heads = heads = self.config.heads(model)
        self.recompute = model.activation_checkpointing
        width = model.hidden_size
        self.query = nn.Linear(width, heads.key_width, bias=False)
        self.key = nn.Linear(width, heads.key_width, bias=False)
        self.value = nn.Linear(width, heads.value_width, bias=False)
        self.output = nn.Linear(heads.value_width, width, bias=False)
        self.convolutions: nn.ModuleDict | None = None
        if self.config.convolves:
            widths = {"query": heads.key_width, "key": heads.key_width, "value": heads.value_width}
            self.convolutions = nn.ModuleDict(
                {name: ShortConvolution(width, convolution_bias) for name, width in widths.items()}
            )
        self.gate: nn.Module | None = None  # [B, T, d] -> [B, T, H*V], if what is read is gated

    def forward(self, x: Tensor, first_value: Tensor, context: SequenceContext) -> Tensor:
        inputs, gate = segment(self.recompute, self._project, x)
        if self.convolutions is not None:
            inputs += context.halo(f"{self.name}.convolution", inputs[:3], TAPS - 1)
        out, skip = self._recur(inputs, context)
        return segment(self.recompute, self._finish, out, *gate, *skip)

    def controls(self, x: Tensor) -> tuple[Tensor, ...]:
        """What decays and rates are made from, each [B, T, .]."""
        raise NotImplementedError

    def operands(self, query: Tensor, key: Tensor, value: Tensor, *controls: Tensor) -> Operands:
        """Of query, key and value [B, T, heads, width], convolved, and the controls."""
        raise NotImplementedError

    def chunk_maps(self, operands: Operands) -> ChunkMaps:
        """In matmuls, of operands in float32 or float64."""
        raise NotImplementedError

    def kernel(self, operands: Operands, state: Tensor) -> tuple[Tensor, Tensor]:
        """The op of flash-linear-attention: reads [B, T, H, V] and the state [B, H, K, V] after them."""
        raise NotImplementedError

    def normed(self, out: Tensor, *gate: Tensor) -> Tensor:
        """Reads [B, T, H, V] and the gate [B, T, H, V] if there is one -> [B, T, H, V] or [B, T, H*V]."""
        raise NotImplementedError

    def _project(self, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        gate = () if self.gate is None else (self.gate(x),)
        return (self.query(x), self.key(x), self.value(x), *self.controls(x)), gate

    def _operands(self, *inputs: Tensor) -> Operands:
        """Query, key and value, the controls, and the tokens before query, key and value."""
        projected, controls = inputs[:3], inputs[3:]
        if self.convolutions is not None:
            parts = zip(self.convolutions.values(), projected, controls[-3:], strict=True)
            projected = tuple(convolve(z, before) for convolve, z, before in parts)
            controls = controls[:-3]
        widths = (self.heads.key, self.heads.key, self.heads.value)
        split = (z.unflatten(-1, (-1, width)) for z, width in zip(projected, widths, strict=True))
        return self.operands(*split, *controls)

    def _maps(self, *inputs: Tensor) -> tuple[ChunkMaps, tuple[Tensor, ...]]:
        operands = self._operands(*inputs)
        dtype = operands.log_decay.dtype
        query, key, value = (z.to(dtype) for z in operands[:3])
        wide = operands._replace(query=query, key=key, value=value)
        return self.chunk_maps(wide), operands.skip

    def _recur(
        self, inputs: tuple[Tensor, ...], context: SequenceContext
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Reads [B, T, H, V], and what is added to them, if anything. The state is float32 everywhere."""
        query, heads = inputs[0], self.heads
        dtype = torch.promote_types(query.dtype, torch.float32)
        name, shape = f"{self.name}.state", (query.shape[0], heads.number, heads.key, heads.value)
        zeros = query.new_zeros(shape, dtype=dtype)
        if choose_backend(self.config, self.kind, query.device, query.dtype, heads.key) == "fla":
            operands = segment(self.recompute, self._operands, *inputs)
            (state,) = context.receive(name, (zeros,))
            out, state = self.kernel(operands, state)
            return context.send(name, (state,), tie=out), operands.skip
        with without_autocast(query.device):
            maps, skip = segment(self.recompute, self._maps, *inputs)
            (state,) = context.receive(name, (zeros,))
            states, state = chunk_recurrence.carry(maps, state)
            states = context.send(name, (state,), tie=states)  # before any read: the next rank waits for it
            return chunk_recurrence.read(maps, states, query.shape[1]), skip

    def _finish(self, out: Tensor, *gate_and_skip: Tensor) -> Tensor:
        gated = self.gate is not None
        for skip in gate_and_skip[gated:]:
            out = out + skip
        gate = (z.unflatten(-1, (-1, self.heads.value)) for z in gate_and_skip[:gated])
        normed = self.normed(out, *gate)
        return self.output(normed if normed.dim() == 3 else normed.flatten(2))

    def initialise(self, generator: torch.Generator) -> None:
        for linear in (self.query, self.key, self.value):
            linear_default_(linear.weight, generator)
        if isinstance(self.gate, nn.Linear):
            linear_default_(self.gate.weight, generator)
        nn.init.zeros_(self.output.weight)


def choose_backend(
    config: RecurrenceConfig, kind: str, device: torch.device, dtype: torch.dtype, key_width: int
) -> Literal["fla", "torch"]:
    """Kernels on GPUs, matmuls on CPUs; ValueError where the kernels are wanted and cannot run."""
    if config.backend == "torch" or (config.backend == "auto" and device.type in ("cpu", "meta")):
        return "torch"
    problem = None
    if device.type != "cuda":
        problem = f"runs in Triton on GPUs, not on the device {device.type!r}"
    elif (name := str(dtype).removeprefix("torch.")) in config.refused_dtypes:
        problem = f"takes no {name}"
    elif config.widest_key is not None and key_width > config.widest_key:
        problem = f"takes heads of at most {config.widest_key} key dims on a GPU, not {key_width}"
    elif find_spec("fla") is None:
        problem = "is not installed (pip install flash-linear-attention)"
    if problem is None:
        return "fla"
    raise ValueError(
        f"model.{kind}.backend={config.backend}: {config.op} of flash-linear-attention {problem}; "
        f"use model.{kind}.backend=torch, plain matmuls that run anywhere"
    )
