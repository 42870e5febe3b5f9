"""What a rank exchanges with its neighbours inside one call: the window before it, and the boundary state.

S_K travels as soon as it is routed, before any attention; S_V and the magnitudes follow. In the backward the
window's gradients travel first, then the running gradient of the slots, then the shares of its tokens.
"""

import torch
from torch import Tensor

from models.kvm.layout import KVMSettings, Plan
from models.kvm.rewind import SlotTensors
from models.kvm.tokens import Tokens
from parallel.sequence.context import Exchange, HeadSplit

Window = tuple[Tensor, Tensor, Tensor | None]  # keys, values and gate [B, w, H, ...]


class Handover:
    def __init__(self, exchange: Exchange, settings: KVMSettings, plan: Plan, head_split: HeadSplit) -> None:
        start, stop = plan.start, plan.stop
        self.exchange = exchange
        self.has_previous = exchange.has_previous
        self.has_next = exchange.has_next
        self.before = min(settings.halo, start)  # tokens before the shard that it reads or folds
        # Tokens from `edge` on are needed by the next rank too.
        self.edge = max(stop - settings.halo, 0) if exchange.has_next else stop
        self.stop = stop
        self.edge_is_local = self.edge >= start
        self._window: tuple[Tensor, ...] = ()
        self._head_split = head_split
        self.node = head_split.node if self.has_previous or self.has_next else None
        self._slots_start = plan.slots_start
        self._slots_stop = plan.slots_stop

    def head_groups(self, heads: int) -> tuple[slice, ...]:
        """The heads of each message about the state; all at once where there are no neighbours."""
        alone = not (self.has_previous or self.has_next)
        return (slice(0, heads),) if alone else self._head_split.of(heads)

    def receive_window(self, local: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The halo [B, w, H, ...] before each of the local tensors [B, T, H, ...]."""
        like = tuple(tensor.new_empty(len(tensor), self.before, *tensor.shape[2:]) for tensor in local)
        self._window = self.exchange.receive_previous("kvm.window", like) if self.before else like
        return self._window

    def complete(self, window: Window, count: int) -> Window:
        """The last `count` tokens, of which the shard holds `window` and the rank before sent the others."""
        missing = count - window[0].shape[1]
        if missing <= 0 or not self._window:
            return window
        pairs = zip(self._window, (one for one in window if one is not None), strict=True)
        keys, values, *gate = (torch.cat([sent[:, -missing:], own], dim=1) for sent, own in pairs)
        return keys, values, gate[0] if gate else None

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
            gradient.before.zero_()

    def send_share(self, tokens: tuple[Tokens, ...]) -> None:
        self._send_before("kvm.share", tokens)

    def receive_keys(self, k: Tensor, dtype: torch.dtype) -> Tensor:
        """S_K [m, B, H, D] before the shard of keys k [B, T, H, D]."""
        return self.exchange.receive_previous("kvm.keys", self._like(k, dtype, self._slots_start)[:1])[0]

    def send_keys(self, keys: Tensor) -> None:
        """Of the folds up to the shard's end; nobody writes to `keys` any more."""
        self.exchange.send_next("kvm.keys", (keys,))

    def receive_values(self, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """S_V [m, B, H, D] and magnitudes [m, B, H] before the shard."""
        like = self._like(k, dtype, self._slots_start)[1:]
        values, magnitudes = self.exchange.receive_previous("kvm.values", like)
        return values, magnitudes

    def send_values(self, values: Tensor, magnitudes: Tensor) -> None:
        self.exchange.send_next("kvm.values", (values, magnitudes))

    def receive_slot_gradient(self, k: Tensor, dtype: torch.dtype) -> SlotTensors:
        like = self._like(k, dtype, self._slots_stop)
        keys, values, magnitudes = self.exchange.receive_next("kvm.slots.gradient", like)
        return keys, values, magnitudes

    def send_slot_gradient(self, gradient: SlotTensors) -> None:
        self.exchange.send_previous("kvm.slots.gradient", gradient)

    def _like(self, k: Tensor, dtype: torch.dtype, slots: int) -> SlotTensors:
        batch, _, heads, width = k.shape
        shape = (slots, batch, heads, width)
        keys, values = (torch.empty(shape, dtype=dtype, device=k.device) for _ in range(2))
        return keys, values, torch.empty(shape[:3], dtype=dtype, device=k.device)

    def _edge_of(self, tokens: tuple[Tokens, ...]) -> tuple[Tensor, ...]:
        return tuple(one.span(self.edge, self.stop).contiguous() for one in tokens)

    def _receive_edge(self, name: str, tokens: tuple[Tokens, ...]) -> tuple[Tensor, ...]:
        like = self._edge_of(tokens)
        return self.exchange.receive_next(name, like) if self.edge < self.stop else like

    def _send_before(self, name: str, tokens: tuple[Tokens, ...]) -> None:
        if self.before:
            # Copies: a send may still read its buffers when sums start anew.
            befores = tuple(one.before.clone() for one in tokens if one.before is not None)
            self.exchange.send_previous(name, befores)
