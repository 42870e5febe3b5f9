"""Where the window of a state grows in place: a decoded token is written behind it, and nothing is copied."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from models.kvm.state import KVMState


class WindowRoom:
    """Memory for a whole window, shared by the states of a sequence.

    Each state sees the tokens up to its own, which are never written again. Only the newest of them may add
    the next token here: going on from an older one needs room of its own.
    """

    def __init__(self, keys: Tensor, values: Tensor, gate: Tensor | None, used: int) -> None:
        self.keys = keys  # [B, room, H, D], contiguous
        self.values = values
        self.gate = gate  # [B, room, H]
        self._used = used

    @classmethod
    def copied(
        cls, state: "KVMState", held: int, room: int, like: tuple[Tensor, Tensor | None]
    ) -> "WindowRoom":
        """Room for `room` tokens with the last `held` of a state's window; like: k, and the gate if any."""

        def wider(window: Tensor, one: Tensor) -> Tensor:
            buffer = one.new_empty(window.shape[0], room, *window.shape[2:])
            buffer[:, :held] = window[:, window.shape[1] - held :]
            return buffer

        k, gate = like
        of_gate = None if gate is None or state.window_gate is None else wider(state.window_gate, gate)
        return cls(wider(state.window_keys, k), wider(state.window_values, k), of_gate, held)

    def fits(self, like: tuple[Tensor, Tensor | None]) -> bool:
        """Whether tokens as `like` can be written here as they are."""
        k, gate = like
        if self.keys.is_inference() and not torch.is_inference_mode_enabled():
            return False  # such tensors are never written to again
        same = self.keys.dtype == k.dtype and self.keys.device == k.device
        return same and (gate is None or (self.gate is not None and self.gate.dtype == gate.dtype))

    def take(self, held: int) -> bool:
        """Take the place behind the first `held` tokens, if it is free."""
        if self._used != held or held == self.keys.shape[1]:
            return False
        self._used = held + 1
        return True

    def put(self, place: int, k: Tensor, v: Tensor, gate: Tensor | None) -> None:
        """Write one token, k and v [B, 1, H, D]."""
        self.keys[:, place] = k[:, 0]
        self.values[:, place] = v[:, 0]
        if gate is not None and self.gate is not None:
            self.gate[:, place] = gate[:, 0]

    def window(self, tokens: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Views of the first tokens."""
        gate = None if self.gate is None else self.gate[:, :tokens]
        return self.keys[:, :tokens], self.values[:, :tokens], gate


def room_after(
    before: "KVMState", held: int, room: int, like: tuple[Tensor, Tensor | None], grows: bool
) -> WindowRoom:
    """Where the last `held` tokens of a state's window lie; with the place behind them taken, if it grows."""
    own = before.room
    goes_on = own is not None and held == before.window_keys.shape[1] and own.fits(like)
    if own is not None and goes_on and (not grows or own.take(held)):
        return own
    own = WindowRoom.copied(before, held, room, like)
    own.take(held)
    return own
