"""What a rank exchanges with its neighbours inside one call: the window before it, and the boundary state.

S_K travels as soon as it is routed, before any attention; S_V and the magnitudes follow. In the backward the
window's gradients travel first, then the running gradient of the slots, then the shares of its tokens.
"""

import torch
from torch import Tensor

from models.kvm.layout import KVMSettings, Plan
from models.kvm.rewind import SlotTensors
from models.kvm.tokens import Tokens
from parallel.sequence.context import Exchange


class Handover:
    def __init__(self, exchange: Exchange, settings: KVMSettings, plan: Plan) -> None:
        start, stop = plan.start, plan.stop
        self.exchange = exchange
        self.has_previous = exchange.has_previous
        self.has_next = exchange.has_next
        self.before = min(settings.halo, start)  # tokens before the shard that it reads or folds
        # Tokens from `edge` on are needed by the next rank too.
        self.edge = max(stop - settings.halo, 0) if exchange.has_next else stop
        self.stop = stop
        self.edge_is_local = self.edge >= start
        self._slots_start = plan.slots_start
        self._slots_stop = plan.slots_stop

    def receive_window(self, local: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The halo [B, w, H, ...] before each of the local tensors [B, T, H, ...]."""
        like = tuple(tensor.new_empty(len(tensor), self.before, *tensor.shape[2:]) for tensor in local)
        return self.exchange.receive_previous("kvm.window", like) if self.before else like

    def send_window(self, tokens: tuple[Tokens, ...]) -> None:
        if self.edge < self.stop:
            self.exchange.send_next("kvm.window", self._edge_of(tokens))

    def receive_window_gradient(self, tokens: tuple[Tokens, ...]) -> tuple[Tensor, ...]:
        return self._receive_edge("kvm.window.gradient", tokens)

    def receive_share(self, tokens: tuple[Tokens, ...]) -> None:
        for gradient, share in zip(tokens, self._receive_edge("kvm.share", tokens), strict=True):
            gradient.add(self.edge, share)

    def send_window_gradient(self, tokens: tuple[Tokens, ...]) -> None:
        """Send the halo's gradients and start them anew for the shares that follow."""
        self._send_before("kvm.window.gradient", tokens)
        for gradient in tokens:
            assert gradient.before is not None, "a rank with a previous one has a halo"
            gradient.before = torch.zeros_like(gradient.before)

    def send_share(self, tokens: tuple[Tokens, ...]) -> None:
        self._send_before("kvm.share", tokens)

    def receive_keys(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        """S_K [m, B, H, D] before the shard of queries q [B, T, H, D]."""
        return self.exchange.receive_previous("kvm.keys", self._like(q, dtype, self._slots_start)[:1])[0]

    def send_keys(self, keys: Tensor) -> None:
        self.exchange.send_next("kvm.keys", (keys,))

    def receive_values(self, q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """S_V [m, B, H, D] and magnitudes [m, B, H] before the shard."""
        like = self._like(q, dtype, self._slots_start)[1:]
        values, magnitudes = self.exchange.receive_previous("kvm.values", like)
        return values, magnitudes

    def send_values(self, values: Tensor, magnitudes: Tensor) -> None:
        self.exchange.send_next("kvm.values", (values, magnitudes))

    def receive_slot_gradient(self, q: Tensor, dtype: torch.dtype) -> SlotTensors:
        like = self._like(q, dtype, self._slots_stop)
        keys, values, magnitudes = self.exchange.receive_next("kvm.slots.gradient", like)
        return keys, values, magnitudes

    def send_slot_gradient(self, gradient: SlotTensors) -> None:
        self.exchange.send_previous("kvm.slots.gradient", gradient)

    def _like(self, q: Tensor, dtype: torch.dtype, slots: int) -> SlotTensors:
        batch, _, heads, width = q.shape
        shape = (slots, batch, heads, width)
        keys, values = (torch.empty(shape, dtype=dtype, device=q.device) for _ in range(2))
        return keys, values, torch.empty(shape[:3], dtype=dtype, device=q.device)

    def _edge_of(self, tokens: tuple[Tokens, ...]) -> tuple[Tensor, ...]:
        return tuple(one.span(self.edge, self.stop).contiguous() for one in tokens)

    def _receive_edge(self, name: str, tokens: tuple[Tokens, ...]) -> tuple[Tensor, ...]:
        like = self._edge_of(tokens)
        return self.exchange.receive_next(name, like) if self.edge < self.stop else like

    def _send_before(self, name: str, tokens: tuple[Tokens, ...]) -> None:
        if self.before:
            befores = tuple(one.before for one in tokens if one.before is not None)
            self.exchange.send_previous(name, tuple(tensor.contiguous() for tensor in befores))
