"""What a KVM layer keeps of the tokens it has seen."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from models.kvm.window_room import WindowRoom


@dataclass(frozen=True)
class SlotReads:
    """What reads see of a state's slots, kept from token to token while the slots stay the same."""

    keys: Tensor  # [B, H, m, D] normed
    values: Tensor  # [B, H, m, D]
    made_with: tuple[Tensor, Tensor]  # the norm's weight and bias
    versions: tuple[int | None, ...]

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, weight: Tensor, bias: Tensor) -> "SlotReads":
        return cls(keys, values, (weight, bias), (_version(weight), _version(bias)))

    def fit(self, weight: Tensor, bias: Tensor) -> bool:
        """Whether they were made with this norm, not trained since."""
        same = self.made_with[0] is weight and self.made_with[1] is bias
        return same and self.versions == (_version(weight), _version(bias))


@dataclass(frozen=True)
class KVMState:
    """Slots and window after `position` tokens: enough to go on, by one token or by many.

    Slots (m) are running sums in float32 (float64 for float64 inputs), sinks first; H are the heads of keys
    and values. All of it carries gradients. The window holds the tokens that are not folded in yet, or that
    the next block still reads.
    """

    keys: Tensor  # [B, H, m, D] sums of normed keys
    values: Tensor  # [B, H, m, D] sums of values
    radii: Tensor | None  # [B, H, m] length of the value that opened the slot; None when value_radius=False
    counts: Tensor | None  # [B, H, m] tokens summed into the slot; None when value_radius=True
    window_keys: Tensor  # [B, W, H, D]
    window_values: Tensor  # [B, W, H, D]
    window_gate: Tensor | None  # [B, W, H]; None when the layer has no merge gate
    position: int
    reads: SlotReads | None = field(default=None, repr=False, compare=False)
    room: "WindowRoom | None" = field(default=None, repr=False, compare=False)  # in which the window may grow

    @property
    def magnitudes(self) -> Tensor:
        """[B, H, m] the per-slot number that scales its value: the radius, or the count."""
        magnitudes = self.radii if self.radii is not None else self.counts
        assert magnitudes is not None, "a state holds radii or counts"
        return magnitudes

    def map(self, function: Callable[[Tensor], Tensor]) -> "KVMState":
        """The state with `function` applied to every tensor [B, ...] that it holds."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {
            name: function(one) for name, one in held.items() if isinstance(one, Tensor)
        }
        reads = self.reads
        if reads is not None:
            reads = replace(reads, keys=function(reads.keys), values=function(reads.values))
        return replace(self, **changed, reads=reads, room=None)


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written to, where that is counted."""
    return None if tensor.is_inference() else tensor._version


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Routing is chaotic in low precision, so sums are never kept below float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def window_after(
    state: KVMState | None, k: Tensor, v: Tensor, gate: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The last `count` tokens of the state's window and a call's k, v [B, T, H, D] and gate [B, T, H].

    Copies, so that a state does not keep a whole call alive.
    """

    def last(before: Tensor | None, local: Tensor) -> Tensor:
        missing = count - local.shape[1]
        if missing <= 0 or before is None:
            return local[:, max(-missing, 0) :].clone()
        return torch.cat([before[:, before.shape[1] - missing :], local], dim=1)

    return (
        last(state.window_keys if state else None, k),
        last(state.window_values if state else None, v),
        None if gate is None else last(state.window_gate if state else None, gate),
    )
