"""The slots on their way back: a call's memory that undoes its folds bitwise, newest first."""

from torch import Tensor

from models.kvm.layout import KVMSettings
from models.kvm.memory import (
    KeyNorm,
    ReadRows,
    RoutedTokens,
    add_magnitudes,
    as_rows,
    grown,
    read_values_backward,
    scale_of,
    value_lengths,
)

SlotTensors = tuple[Tensor, Tensor, Tensor]  # of S_K, S_V [m, B, H, D] and the magnitudes [m, B, H]


class RewindableMemory:
    """S_K, S_V, magnitudes and what reads see of them. The rows that folds touch are kept, to go back to."""

    def __init__(self, boundary: SlotTensors, slots: int, norm: KeyNorm, settings: KVMSettings) -> None:
        self.norm = norm
        self.settings = settings
        self.keys, self.values, self.magnitudes = (grown(tensor, slots) for tensor in boundary)
        self._before_folds: list[tuple[RoutedTokens, Tensor, Tensor]] = []

    def fold(self, tokens: RoutedTokens) -> None:
        """Go forward; what reads see waits for `renew`."""
        assert tokens.values is not None, "routed without values"
        keys, values = as_rows(self.keys), as_rows(self.values)
        if tokens.outnumber_slots:
            before = self.keys[: tokens.slots].clone(), self.values[: tokens.slots].clone()
        else:
            before = keys.index_select(0, tokens.rows), values.index_select(0, tokens.rows)
        self._before_folds.append((tokens.without_tokens(), *before))
        keys.index_add_(0, tokens.rows, as_rows(tokens.weighted(tokens.keys)))
        values.index_add_(0, tokens.rows, as_rows(tokens.weighted(tokens.values)))
        add_magnitudes(self.magnitudes.view(-1), tokens, self.settings)

    def renew(self) -> None:
        """Bring what reads see of all slots up to date."""
        self.normed, self.read = ReadRows(self.keys), ReadRows(self.values)
        normed, self._mean, self._deviation = self.norm.with_statistics(self.keys)
        self.normed.set_first(normed)
        self._lengths = value_lengths(self.values) if self.settings.value_radius else None
        self.read.set_first(self.values, scale_of(self._lengths, self.magnitudes))

    def undo(self) -> RoutedTokens:
        """Undo the newest fold; returns where its tokens went. Radii are fixed, counts are whole numbers."""
        routed, keys, values = self._before_folds.pop()
        magnitudes = self.magnitudes.view(-1)
        if not self.settings.value_radius:
            magnitudes.index_add_(0, routed.rows, magnitudes.new_ones(len(routed.rows)), alpha=-1)
        normed, mean, deviation = self.norm.with_statistics(keys)
        lengths = value_lengths(values) if self.settings.value_radius else None
        if routed.outnumber_slots:
            self.keys, self.values = keys, values
            self._mean, self._deviation, self._lengths = mean, deviation, lengths
            self.normed.set_first(normed)
            self.read.set_first(values, scale_of(lengths, self.magnitudes[: routed.slots]))
            return routed
        rows = routed.rows
        as_rows(self.keys).index_copy_(0, rows, keys)
        as_rows(self.values).index_copy_(0, rows, values)
        as_rows(self._mean).index_copy_(0, rows, mean)
        as_rows(self._deviation).index_copy_(0, rows, deviation)
        self.normed.set(routed.slot, normed)
        scale = scale_of(lengths, magnitudes.index_select(0, rows).view_as(mean[..., 0]))
        self.read.set(routed.slot, values * scale[..., None])
        if self._lengths is not None and lengths is not None:
            self._lengths.view(-1).index_copy_(0, rows, lengths)
        return routed

    def backward(self, grad_normed: Tensor, grad_read: Tensor) -> tuple[SlotTensors, tuple[Tensor, Tensor]]:
        """Gradients of the first m slots, and of the norm's weight and bias, from those [m, B, H, D] of what
        reads see; `grad_read` is written over."""
        used = slice(len(grad_normed))
        grad_keys, *grad_norm = self.norm.backward(
            grad_normed, self.keys[used], self._mean[used], self._deviation[used]
        )
        lengths = None if self._lengths is None else self._lengths[used]
        grad_values = read_values_backward(grad_read, self.values[used], self.magnitudes[used], lengths)
        return (grad_keys, *grad_values), (grad_norm[0], grad_norm[1])
