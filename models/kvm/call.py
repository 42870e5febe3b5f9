"""One call of the operator: what it is about, its tensors, and the passes that a backend makes over them.

Slots are slots first, [m, B, H, D]. Heads are independent: passes that ranks wait for take a group of them.
A head is one of keys, values and slots; `group` neighbouring heads of the queries read it, H times as many.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from models.kvm.handover import Handover
from models.kvm.layout import KVMSettings, Plan
from models.kvm.rewind import SlotTensors
from models.kvm.state import accumulation_dtype
from models.kvm.tokens import Tokens

Routes = tuple[Tensor, ...]  # int32, where the folded tokens go; the layout is the backend's


@dataclass(frozen=True)
class CallTensors:
    """The tensor arguments of `KVMFunction`, in its order."""

    q: Tensor  # [B, T, group * H, D]
    k: Tensor  # [B, T, H, D]
    v: Tensor
    gate: Tensor | None  # [B, T, H]
    norm_weight: Tensor  # [D]
    norm_bias: Tensor
    state_temperature: Tensor | None  # [H]
    window_temperature: Tensor | None
    slot_keys: Tensor | None = None  # [m, B, H, D] before the call; None where the rank before has it
    slot_values: Tensor | None = None
    slot_magnitudes: Tensor | None = None  # [m, B, H]
    window_keys: Tensor | None = None  # [B, w, H, D], the tokens before the call that it reads or folds
    window_values: Tensor | None = None
    window_gate: Tensor | None = None  # [B, w, H]

    def all(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, one.name) for one in fields(self))

    def tokens(self, start: int) -> tuple[Tokens, ...]:
        """Keys, values and, if there is one, gate up to the end of the call that begins at `start`."""
        pairs = (
            (self.window_keys, self.k),
            (self.window_values, self.v),
            (self.window_gate, self.gate),
        )
        return tuple(Tokens(before, one, start) for before, one in pairs if one is not None)

    def boundary(self) -> SlotTensors:
        """S_K, S_V and magnitudes before the call; no slots at the start of a sequence."""
        empty = self.norm_weight.new_empty(0, self.k.shape[0], *self.k.shape[2:])
        return (
            empty if self.slot_keys is None else self.slot_keys,
            empty if self.slot_values is None else self.slot_values,
            empty[..., 0] if self.slot_magnitudes is None else self.slot_magnitudes,
        )

    def of_heads(self, heads: slice) -> "CallTensors":
        """Views of a group of heads."""
        if heads == slice(0, self.heads):
            return self
        changed = {"q": self.q[:, :, self.query_heads(heads)]}
        for one in fields(self):
            tensor = getattr(self, one.name)
            if tensor is not None and one.name != "q" and not one.name.startswith("norm"):
                changed[one.name] = tensor[heads] if tensor.dim() == 1 else tensor[:, :, heads]
        return replace(self, **changed)

    def query_heads(self, heads: slice) -> slice:
        """The heads of the queries that read some heads."""
        return slice(heads.start * self.group, heads.stop * self.group)

    @property
    def heads(self) -> int:
        return self.k.shape[2]

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.k.shape[2]

    @property
    def accumulation_dtype(self) -> torch.dtype:
        return accumulation_dtype(self.q.dtype)


@dataclass(frozen=True)
class Attended:
    """What the attention of a call leaves."""

    output: Tensor  # [B, T, group * H, D]
    log_sum: Tensor  # [B, group * H, T]
    routes: Routes
    slots: SlotTensors  # after the call's last fold


@dataclass(frozen=True)
class SlotChain:
    """The running gradient of the slots, from the rank after to the rank before, by groups of heads."""

    groups: tuple[slice, ...]
    waits: bool  # whether `receive` waits for another rank
    hands_on: bool  # whether another rank waits for `send`
    queries_done: Callable[[], None]  # called once the gradient of the queries is complete
    receive: Callable[[slice], SlotTensors]  # of the state after the call; the groups in order, each once
    send: Callable[[slice, SlotTensors], None]  # of the state before the call


class Gradients(Protocol):
    """The backward of one call, filled by `window`, perhaps `window_at_edge`, and `states`."""

    @property
    def queries(self) -> Tensor:
        """[B, T, group * H, D], complete once `states` says so."""
        ...

    @property
    def tokens(self) -> tuple[Tokens, ...]:
        """Of keys, values and, if there is one, gate: views into which shares of other ranks are added."""
        ...

    def window(self) -> None:
        """Through the window; tokens that the rank after reads too wait for `window_at_edge`."""
        ...

    def window_at_edge(self, later: tuple[Tensor, ...]) -> None:
        """Go on from the sums [B, t, H, D] of the rank after for keys and values, as one rank would."""
        ...

    def states(self, chain: SlotChain) -> SlotTensors:
        """Through the state, and the shares of its tokens; returns the gradient of the state before."""
        ...

    def result(self, boundary: SlotTensors) -> CallTensors: ...


class Passes(Protocol):
    """The passes of one backend over one call."""

    def route(self, heads: slice, keys: Tensor) -> tuple[Routes, Tensor]:
        """Routes of all folds and S_K after them, from S_K before the call, of some heads: [m, B, h, D]."""
        ...

    def routes_shapes(self, heads: int) -> tuple[tuple[int, ...], ...]:
        """Of the routes of so many heads."""
        ...

    def join_routes(self, groups: list[Routes]) -> Routes:
        """The routes of all heads, from those of groups of heads in order."""
        ...

    def sum_values(
        self, heads: slice, routes: Routes, values: Tensor, magnitudes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """S_V and magnitudes after all folds from those before the call, of some heads and their routes."""
        ...

    def attend(self, routes: Routes | None, boundary: SlotTensors) -> Attended:
        """Attention of all tokens to window and state. routes: None to find them on the way."""
        ...

    def gradients(self, attended: Attended, grad_output: Tensor, edge: int) -> Gradients:
        """attended: its slots are those before the call. Tokens from position `edge` on are needed by the
        rank after too."""
        ...


class Arrivals(Protocol):
    """Tensors of a call that come from other ranks while it runs, and gradients that go back to those."""

    def wait_for_tokens(self) -> None:
        """Until keys, values and gate are filled."""
        ...

    def wait_for_queries(self) -> None: ...

    def return_queries(self, gradient: Tensor) -> None:
        """In the dtype of the queries."""
        ...

    def return_tokens(self, key: Tensor | None, value: Tensor | None, gate: Tensor | None) -> None:
        """Gradients in the dtypes of their tensors, where these want one."""
        ...


@dataclass(frozen=True)
class Call:
    """What a call is about, beside its tensors. arrivals: None where these are all here."""

    settings: KVMSettings
    plan: Plan
    handover: Handover
    returns_state: bool
    passes: Callable[["Call", CallTensors], Passes]
    arrivals: Arrivals | None = None
