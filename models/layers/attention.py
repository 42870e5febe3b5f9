"""What all attention kinds share: projections, value residual, token shift, head norms, rotary, output."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.initialise import linear_default_
from models.kinds.attention import VALUE_RESIDUAL_FACTOR, AttentionConfig
from models.layer_config import low_rank
from models.layers.low_rank import ValueResidual
from models.layers.mixer import Mixer, settings
from models.layers.rotary import rotate
from models.layers.segment import segment
from models.layers.token_shift import TokenShift, difference_to_previous
from parallel.sequence.context import SequenceContext

NORM_EPS = 1e-5
# The place of each among the projections; queries come last, as nobody waits for them before keys are routed.
FINISHED = {1: "key", 2: "value", 0: "query"}
Ready = Callable[[str, Tensor], Tensor]
SHIFT_EXPONENTS = {"query": 0.2, "key": 0.7, "value": 0.7}


class QueriesKeysValues(NamedTuple):
    """Each [B, T, H, D]; keys and values may have fewer heads."""

    query: Tensor
    key: Tensor
    value: Tensor


class AttentionProjections(nn.Module):
    """x [B, T, d] -> queries, keys and values [B, T, H, D], shifted, normed and rotated.

    kv_heads: of keys and values; None: as many as queries have.
    """

    def __init__(
        self, model: ModelConfig, index: int, name: str, rotary_dims: int, kv_heads: int | None = None
    ) -> None:
        super().__init__()
        width = model.num_heads * model.head_width
        kv_width = (kv_heads or model.num_heads) * model.head_width
        self.name = name
        self.head_width = model.head_width
        own_base = settings(model, index, AttentionConfig).rotary_base
        self.rotary_dims, self.rotary_base = rotary_dims, own_base or model.rotary_base
        self.recompute = model.activation_checkpointing
        self.query = nn.Linear(model.hidden_size, width, bias=False)
        self.key = nn.Linear(model.hidden_size, kv_width, bias=False)
        self.value = nn.Linear(model.hidden_size, kv_width, bias=False)
        self.shifts: nn.ModuleDict | None = None
        if model.token_shift:
            depth_ratio = 1 - index / model.num_layers
            widths = {"query": width, "key": kv_width, "value": kv_width}
            self.shifts = nn.ModuleDict(
                {name: TokenShift(widths[name], one * depth_ratio) for name, one in SHIFT_EXPONENTS.items()}
            )
        self.value_residual: ValueResidual | None = None
        if model.value_residual:
            rank = low_rank(model.hidden_size, VALUE_RESIDUAL_FACTOR)
            base_rank = low_rank(model.base_width, VALUE_RESIDUAL_FACTOR)
            self.value_residual = ValueResidual(model.hidden_size, kv_width, rank, base_rank)
        self.norm_query: nn.Module = nn.LayerNorm(self.head_width, eps=NORM_EPS)
        self.norm_key: nn.Module = nn.LayerNorm(self.head_width, eps=NORM_EPS)

    def first_value(self, x0: Tensor) -> Tensor:
        """Values [B, T, H*D] of the normed embedding, of the heads that values have."""
        return self.value(x0) if self.value_residual is not None else x0

    def forward(
        self,
        x: Tensor,
        first_value: Tensor,
        context: SequenceContext,
        ready: Ready = lambda _, tensor: tensor,
    ) -> QueriesKeysValues:
        """ready: is given each of them as soon as it is found, and returns what takes its place."""
        projected = segment(self.recompute, self._project, x, first_value)
        halo: tuple[Tensor, ...] = ()
        if self.shifts is not None:
            halo = context.halo(f"{self.name}.shift", projected, 1)

        found: dict[str, Tensor] = {}
        for place, name in FINISHED.items():
            finish = partial(self._finish, name, context.start)
            found[name] = ready(name, segment(self.recompute, finish, projected[place], *halo[place:][:1]))
        return QueriesKeysValues(**found)

    def _project(self, x: Tensor, first_value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value = self.value(x)
        if self.value_residual is not None:
            value = self.value_residual(x, value, first_value)
        return self.query(x), self.key(x), value

    def _finish(self, name: str, start: int, projected: Tensor, *halo: Tensor) -> Tensor:
        """Shift, norm and rotate one of the three, [B, T, heads * D] -> [B, T, heads, D]."""
        if self.shifts is not None:
            first = projected[:, :1]
            projected = self.shifts[name](projected, difference_to_previous(projected, halo[0], first=first))
        heads = projected.unflatten(-1, (-1, self.head_width))
        if name == "value":
            return heads
        norm = self.norm_query if name == "query" else self.norm_key
        return rotate(norm(heads), start, self.rotary_dims, self.rotary_base)

    def initialise(self, generator: torch.Generator) -> None:
        for linear in (self.query, self.key, self.value):
            linear_default_(linear.weight, generator)


class AttentionMixer(Mixer):
    """Base of the attention kinds, which say how queries meet keys and values."""

    def __init__(self, model: ModelConfig, index: int, rotary_dims: int, kv_heads: int | None = None) -> None:
        super().__init__(model, index)
        self.projections = AttentionProjections(model, index, self.name, rotary_dims, kv_heads)
        self.output = nn.Linear(model.num_heads * model.head_width, model.hidden_size, bias=False)

    def first_value(self, x0: Tensor, context: SequenceContext) -> Tensor:
        return self.projections.first_value(x0)

    def forward(self, x: Tensor, first_value: Tensor, context: SequenceContext) -> Tensor:
        return self.output(self.mix(x, first_value, context).flatten(2))

    def mix(self, x: Tensor, first_value: Tensor, context: SequenceContext) -> Tensor:
        """x [B, T, d] -> [B, T, H, D]."""
        return self.attend(x, self.projections(x, first_value, context), context)

    def attend(self, x: Tensor, heads: QueriesKeysValues, context: SequenceContext) -> Tensor:
        """x [B, T, d] and its queries, keys and values -> [B, T, H, D]."""
        raise NotImplementedError

    def initialise(self, generator: torch.Generator) -> None:
        nn.init.zeros_(self.output.weight)
