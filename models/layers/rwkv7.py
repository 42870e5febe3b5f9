"""The RWKV-7 mixer: its projections around a linear recurrence with a generalised delta rule."""

from math import exp

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig, RWKV7Config
from models.initialise import orthogonal_, ramp
from models.kinds.recurrence import CHUNK
from models.layers import chunk_recurrence
from models.layers.low_rank import LowRank, ValueResidual
from models.layers.mixer import Mixer, settings
from models.layers.rwkv7_chunk import chunk_maps
from models.layers.segment import segment
from models.layers.token_shift import TokenShift, difference_to_previous
from models.precision import without_autocast
from parallel.sequence.context import SequenceContext

HEAD_NORM_EPS = 64e-5
STRONGEST_DECAY = -exp(-0.5)  # log w = -exp(-softplus(-z) - 0.5) = -exp(-0.5) sigmoid(z)
SHIFT_EXPONENTS = {"receptance": 0.2, "decay": 0.9, "key": 0.7, "value": 0.7, "rate": 0.9, "gate": 0.2}


class RWKV7(Mixer):
    """Reads and writes a state [K, V] per head; the token before the first one is 0."""

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__(model, index)
        config, width = settings(model, index, RWKV7Config), model.hidden_size
        ranks, base_ranks = config.ranks(width), config.ranks(model.base_width)
        self.head_dim = config.head_dim
        self.recompute = model.activation_checkpointing
        self.norm_scale = ((index + 1) / model.num_layers) ** 0.7
        depth_ratio = 1 - index / model.num_layers
        self.shifts = nn.ModuleDict(
            {name: TokenShift(width, factor * depth_ratio) for name, factor in SHIFT_EXPONENTS.items()}
        )
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        decay_bias = initial_decay(width, config.head_dim, index / max(model.num_layers - 1, 1))
        rate_bias = -0.19 + 0.3 * zigzag(width, config.head_dim) + 0.4 * ramp(width)
        self.decay = LowRank(width, width, ranks["decay"], base_ranks["decay"], torch.tanh, decay_bias)
        self.rate = LowRank(width, width, ranks["rate"], base_ranks["rate"], initial_bias=rate_bias)
        self.gate = LowRank(width, width, ranks["gate"], base_ranks["gate"], torch.sigmoid)
        self.value_residual: ValueResidual | None = None
        if model.value_residual:
            self.value_residual = ValueResidual(width, width, ranks["value"], base_ranks["value"])
        self.removal = nn.Parameter(torch.empty(width))  # k_k: which part of a key is removed from the state
        self.rate_mix = nn.Parameter(torch.empty(width))  # k_a: how far the rate scales a written key
        self.bonus = nn.Parameter(torch.empty(width // config.head_dim, config.head_dim))  # r_k
        self.norm = nn.GroupNorm(width // config.head_dim, width, eps=HEAD_NORM_EPS)

    def first_value(self, x0: Tensor, context: SequenceContext) -> Tensor:
        if self.value_residual is None:
            return x0
        (halo,) = context.halo(f"{self.name}.first_shift", (x0,), 1)
        return self.value(self.shifts["value"](x0, _difference(x0, halo)))

    def forward(self, x: Tensor, first_value: Tensor, context: SequenceContext) -> Tensor:
        (halo,) = context.halo(f"{self.name}.shift", (x,), 1)
        *recurrence, gate = segment(self.recompute, self._project, x, halo, first_value)
        heads = [z.unflatten(-1, (-1, self.head_dim)) for z in recurrence]
        out = self._recur(heads, context)
        return segment(self.recompute, self._finish, out, gate, heads[0], heads[2], heads[3])

    def _project(self, x: Tensor, halo: Tensor, first_value: Tensor) -> tuple[Tensor, ...]:
        """r, log w, k, v, a, b and the output's gate, each [B, T, d]."""
        difference = _difference(x, halo)
        mixed = {name: shift(x, difference) for name, shift in self.shifts.items()}
        log_w = STRONGEST_DECAY * torch.sigmoid(self.decay(mixed["decay"]).float())
        key, value = self.key(mixed["key"]), self.value(mixed["value"])
        if self.value_residual is not None:
            value = self.value_residual(mixed["value"], value, first_value)
        rate = torch.sigmoid(self.rate(mixed["rate"]))
        removed = (key * self.removal).unflatten(-1, (-1, self.head_dim))
        removed = F.normalize(removed, dim=-1).flatten(-2)
        key = key * (1 + (rate - 1) * self.rate_mix)
        receptance = self.receptance(mixed["receptance"])
        return receptance, log_w, key, value, -removed, removed * rate, self.gate(mixed["gate"])

    def _recur(self, heads: list[Tensor], context: SequenceContext) -> Tensor:
        """r, log w, k, v, a, b [B, T, H, D] -> reads [B, T, H, D]; the state is float32 everywhere."""
        batch, tokens, count, width = heads[0].shape
        dtype = torch.promote_types(heads[0].dtype, torch.float32)
        name = f"{self.name}.state"
        zeros = heads[0].new_zeros(batch, count, width, width, dtype=dtype)
        if heads[0].is_cuda:
            (state,) = context.receive(name, (zeros,))
            out, state = _fla_recurrence(heads, state)
            return context.send(name, (state,), tie=out)
        with without_autocast(heads[0].device):
            maps = segment(self.recompute, chunk_maps, *(z.to(dtype) for z in heads))
            (state,) = context.receive(name, (zeros,))
            states, state = chunk_recurrence.carry(maps, state)
            states = context.send(name, (state,), tie=states)  # before any read: the next rank waits for it
            return chunk_recurrence.read(maps, states, tokens)

    def _finish(self, out: Tensor, gate: Tensor, receptance: Tensor, key: Tensor, value: Tensor) -> Tensor:
        normed = self.norm(out.to(value.dtype).flatten(0, 1).flatten(1)).view_as(gate)
        bonus = (receptance * key * self.bonus).sum(-1, keepdim=True) * value
        return self.output((normed + bonus.flatten(-2)) * gate)

    def initialise(self, generator: torch.Generator) -> None:
        orthogonal_(self.receptance.weight, 1.0, generator)
        orthogonal_(self.key.weight, 0.1, generator)
        orthogonal_(self.value.weight, 1.0, generator)
        nn.init.zeros_(self.output.weight)
        nn.init.constant_(self.norm.weight, self.norm_scale)
        nn.init.zeros_(self.norm.bias)
        nn.init.constant_(self.rate_mix, 1.02)
        nn.init.constant_(self.bonus, -0.04)
        with torch.no_grad():
            self.removal.copy_(0.71 - 0.1 * ramp(self.removal.numel()))


def zigzag(width: int, head_dim: int) -> Tensor:
    """A signed square from -1 to 1 within every head."""
    half = max(head_dim - 1, 1) / 2
    within = (torch.arange(width) % head_dim - half) / half
    return within * within.abs()


def initial_decay(width: int, head_dim: int, depth: float) -> Tensor:
    """The decay's bias: slow channels first, steeper in later layers; depth from 0 (first layer) to 1."""
    rise = (torch.arange(width) / max(width - 1, 1)) ** (1 + depth**0.3)
    return -6 + 6 * rise + 0.5 + 2.5 * zigzag(width, head_dim)


def _difference(x: Tensor, halo: Tensor) -> Tensor:
    return difference_to_previous(x, halo, first=torch.zeros_like(x[:, :1]))


def _fla_recurrence(heads: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The Triton kernels of flash-linear-attention: state [N, H, K, V], scale 1.

    Told how strong a decay may be, as their own layer tells them, they run on matrix units and in longer
    chunks, of which fewer states are kept; shards are cut at the edges of these.
    """
    from fla.ops.rwkv7 import chunk_rwkv7

    out, state = chunk_rwkv7(
        *heads,
        scale=1.0,
        initial_state=state,
        output_final_state=True,
        safe_gate=True,
        lower_bound=STRONGEST_DECAY,
        chunk_size=CHUNK,
    )
    return out, state
