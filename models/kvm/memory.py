"""The slots while a call walks through its chunks: sums that folds add to, and what reads see of them.

Sums are slots first, [S, B, H, D] with S the slots at the end of the call: the slots in use are a contiguous
prefix, and a slot keeps its row number `(slot * B + b) * H + h` while the state grows. What reads see is
heads first, [B, H, S, D], which attention kernels like best; a slot is its row `(b * H + h) * S + slot`.
"""

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from models.kvm.layout import Fold, KVMSettings

SMALLEST_NORM = 1e-12
ROW_BLOCK = 64  # what reads see has room for whole blocks of slots, so that searches may go by blocks


@dataclass(frozen=True)
class KeyNorm:
    """N_s: rotary dims are zeroed, then a LayerNorm over D."""

    weight: Tensor  # [D]
    bias: Tensor  # [D]

    def __call__(self, rows: Tensor) -> Tensor:
        return self.with_statistics(rows)[0]

    def with_statistics(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed rows [..., D], their mean and inverse deviation."""
        return torch.native_layer_norm(rows, [rows.shape[-1]], self.weight, self.bias, 1e-5)

    def backward(
        self, grad: Tensor, rows: Tensor, mean: Tensor, deviation: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the rows, the weight and the bias."""
        return torch.ops.aten.native_layer_norm_backward(
            grad, rows, [rows.shape[-1]], mean, deviation, self.weight, self.bias, [True, True, True]
        )


class RoutedTokens:
    """The tokens of one fold, and the slots they go to. Tensors are [B, c, H, ...] in the accumulation dtype.

    A route is the slot a token merges into, or `~slot` of the slot it opens.
    """

    keys: Tensor
    values: Tensor | None

    def __init__(self, fold: Fold, route: Tensor, gate: Tensor | None, settings: KVMSettings) -> None:
        """Where the tokens go, without the tokens: see `of`."""
        self.slots = fold.slots_after
        # Then renewing what reads see of all slots is cheaper than of each token's slot.
        self.outnumber_slots = fold.stop - fold.start >= fold.slots_after
        self.opens = route < 0 if fold.appended else None
        self.slot = route.long() if self.opens is None else torch.where(self.opens, ~route, route).long()
        self.rows = row_numbers(self.slot)
        self.radius_gated = False
        if fold.is_first_state:
            gate = gate if settings.gate_first_state else None
            self.ungated = None
        else:
            self.radius_gated = settings.gate_appends and gate is not None
            self.ungated = None if settings.gate_appends else self.opens
        if gate is not None and self.ungated is not None:
            gate = gate.masked_fill(self.ungated, 1)
        # [B, c, H, 1] what multiplies the token in both sums.
        self.weight = None if gate is None else gate[..., None]

    def of(self, keys: Tensor, values: Tensor | None) -> "RoutedTokens":
        """The same routes with normed keys, and values, of the tokens."""
        routed = copy(self)
        routed.keys, routed.values = keys, values
        return routed

    def without_tokens(self) -> "RoutedTokens":
        routed = copy(self)
        del routed.keys, routed.values
        return routed

    def weighted(self, tensor: Tensor) -> Tensor:
        return tensor if self.weight is None else self.weight * tensor

    def opening_values(self) -> Tensor:
        """Values whose length is the radius of the slot that a token opens."""
        assert self.values is not None, "routed without values"
        return self.weighted(self.values) if self.radius_gated else self.values


class ReadRows:
    """[B, H, S, D] of what reads see, S rounded up, kept up to date with the sums it is made of."""

    def __init__(self, sums: Tensor) -> None:
        """sums: [S, B, H, D]."""
        slots, batch, heads, width = sums.shape
        slots = -(-slots // ROW_BLOCK) * ROW_BLOCK
        self.tensor = sums.new_empty(batch, heads, slots, width)
        self._stripe = torch.arange(batch * heads, device=sums.device).view(batch, 1, heads) * slots

    def set_first(self, rows: Tensor, scale: Tensor | None = None) -> None:
        """Rows [m, B, H, D] of the first m slots, times a scale [m, B, H]; nobody writes to them any more."""
        if len(rows) == self.tensor.shape[2]:  # few slots: slots first reads as fast, and spares a copy
            rows = rows if scale is None else rows * scale[..., None]
            self.tensor = rows.permute(1, 2, 0, 3)
            return
        held, rows = self.tensor[:, :, : len(rows)], rows.permute(1, 2, 0, 3)
        if scale is None:
            held.copy_(rows)
        else:
            torch.mul(rows, scale.permute(1, 2, 0)[..., None], out=held)

    def set(self, slot: Tensor, rows: Tensor) -> None:
        """Rows [B * c * H, D] of slots [B, c, H]."""
        self.tensor = self.tensor.contiguous()
        as_rows(self.tensor).index_copy_(0, (slot + self._stripe).view(-1), rows)

    def first(self, slots: int) -> Tensor:
        return self.tensor[:, :, :slots]


class KeyMemory:
    """S_K, and N_s(S_K) kept up to date."""

    def __init__(self, boundary: Tensor, slots: int, norm: KeyNorm) -> None:
        """boundary: [m, B, H, D], the sums before the first fold."""
        self.norm = norm
        self.sums = grown(boundary, slots)
        self.normed = ReadRows(self.sums)
        self.normed.set_first(norm(boundary))

    def fold(self, tokens: RoutedTokens) -> None:
        sums = as_rows(self.sums)
        sums.index_add_(0, tokens.rows, as_rows(tokens.weighted(tokens.keys)))
        if tokens.outnumber_slots:
            self.normed.set_first(self.norm(self.sums[: tokens.slots]))
        else:
            self.normed.set(tokens.slot, self.norm(sums.index_select(0, tokens.rows)))


class ValueMemory:
    """S_V with the radius or count of each slot, and the values that reads see."""

    def __init__(self, boundary: Tensor, magnitudes: Tensor, slots: int, settings: KVMSettings) -> None:
        """boundary: [m, B, H, D]; magnitudes: [m, B, H]."""
        self.settings = settings
        self.sums = grown(boundary, slots)
        self.magnitudes = grown(magnitudes, slots)
        self.read = ReadRows(self.sums)
        self.read.set_first(boundary, value_scale(boundary, magnitudes, settings))

    def fold(self, tokens: RoutedTokens) -> None:
        assert tokens.values is not None, "routed without values"
        sums, magnitudes = as_rows(self.sums), self.magnitudes.view(-1)
        sums.index_add_(0, tokens.rows, as_rows(tokens.weighted(tokens.values)))
        add_magnitudes(magnitudes, tokens, self.settings)
        if tokens.outnumber_slots:
            used = slice(tokens.slots)
            scale = value_scale(self.sums[used], self.magnitudes[used], self.settings)
            self.read.set_first(self.sums[used], scale)
        else:
            touched = sums.index_select(0, tokens.rows), magnitudes.index_select(0, tokens.rows)
            self.read.set(tokens.slot, read_values(*touched, self.settings))


def read_values(sums: Tensor, magnitudes: Tensor, settings: KVMSettings) -> Tensor:
    """rho * S_V / ||S_V||, or S_V / count: [..., D] from sums [..., D] and magnitudes [...]."""
    return sums * value_scale(sums, magnitudes, settings)[..., None]


def value_scale(sums: Tensor, magnitudes: Tensor, settings: KVMSettings) -> Tensor:
    """[...] what makes sums of values [..., D] the values that are read."""
    return scale_of(value_lengths(sums) if settings.value_radius else None, magnitudes)


def value_lengths(sums: Tensor) -> Tensor:
    """[...] of sums of values [..., D]."""
    return torch.linalg.vector_norm(sums, dim=-1)


def scale_of(lengths: Tensor | None, magnitudes: Tensor) -> Tensor:
    """`value_scale` from the lengths of the sums, or of counts where there are none."""
    return magnitudes.reciprocal() if lengths is None else magnitudes / lengths.clamp_min(SMALLEST_NORM)


def read_values_backward(
    grad: Tensor, sums: Tensor, magnitudes: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the sums and of the magnitudes (none for counts); `grad` is written over.

    lengths: of the sums, or None where magnitudes are counts.
    """
    if lengths is None:
        return grad.div_(magnitudes[..., None]), torch.zeros_like(magnitudes)
    along = torch.linalg.vecdot(grad, sums)
    clamped = lengths.clamp_min(SMALLEST_NORM)
    scale = magnitudes / clamped
    turn = (scale * along / clamped.square()).masked_fill_(lengths < SMALLEST_NORM, 0)
    grad_sums = grad.mul_(scale[..., None]).addcmul_(sums, turn[..., None], value=-1)
    return grad_sums, along / clamped


def add_magnitudes(magnitudes: Tensor, tokens: RoutedTokens, settings: KVMSettings) -> None:
    """Add to [S * B * H] what each token brings: its length where it opens a slot, or a count of one."""
    if not settings.value_radius:
        magnitudes.index_add_(0, tokens.rows, magnitudes.new_ones(len(tokens.rows)))
    elif tokens.opens is not None:
        lengths = torch.linalg.vector_norm(tokens.opening_values(), dim=-1)
        magnitudes.index_add_(0, tokens.rows, lengths.masked_fill_(~tokens.opens, 0).reshape(-1))


def grown(boundary: Tensor, slots: int) -> Tensor:
    """A copy of [m, ...] with room for `slots` slots, zero where they are not opened yet."""
    buffer = boundary.new_zeros(slots, *boundary.shape[1:])
    buffer[: len(boundary)] = boundary
    return buffer


def row_numbers(slot: Tensor) -> Tensor:
    """[B * c * H] rows of slots-first buffers for slots [B, c, H]."""
    batch, _, heads = slot.shape
    stripe = torch.arange(batch * heads, device=slot.device).view(batch, 1, heads)
    return torch.add(stripe, slot, alpha=batch * heads).view(-1)


def as_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
