"""What a model keeps of the tokens it has read, so that the next call goes on where the last one ended."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from models.backbone import Backbone
from parallel.sequence.context import CausalAttention, Exchange, HeadSplit, NoExchange

ALL_TOKENS = sys.maxsize


class CachedSequence:
    """A sequence read in calls of any length, each of which sees all tokens before it.

    Every layer keeps one entry per name: a typed state, a recurrent state, or the last tokens of a halo, as
    many as that name asks for. `start` moves only between calls, so all layers of one call agree on it.
    """

    exchange: Exchange = NoExchange()
    head_split = HeadSplit()
    keeps_state = True

    def __init__(self) -> None:
        self.start = 0
        self._entries: dict[str, Any] = {}

    def halo(
        self, name: str, tensors: tuple[Tensor, ...], count: int, keep: int | None = None
    ) -> tuple[Tensor, ...]:
        before = self._entries.get(name, tuple(z[:, :0] for z in tensors))
        self.keep(name, before, tensors, count if keep is None else keep)
        return before

    def keep(self, name: str, before: tuple[Tensor, ...], tensors: tuple[Tensor, ...], count: int) -> None:
        """Keep for the next call the last `count` of the tokens `before` and those of this call."""
        pairs = zip(before, tensors, strict=True)
        self._entries[name] = tuple(_last(torch.cat(pair, dim=1), count) for pair in pairs)

    def attend(
        self, name: str, attention: CausalAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        before = self.halo(name, (key, value), ALL_TOKENS)
        key, value = (torch.cat(pair, dim=1) for pair in zip(before, (key, value), strict=True))
        return attention.whole(query, key, value)

    def receive(self, name: str, zeros: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        state: tuple[Tensor, ...] = self._entries.get(name, zeros)
        return state

    def send(self, name: str, state: tuple[Tensor, ...], tie: Tensor) -> Tensor:
        self._entries[name] = state
        return tie

    def load(self, name: str) -> Any:
        return self._entries.get(name)

    def store(self, name: str, state: Any) -> None:
        self._entries[name] = state

    def advance(self, tokens: int) -> None:
        """Move past the tokens that every layer has read."""
        self.start += tokens

    def select(self, rows: Tensor) -> "CachedSequence":
        """A cache whose row i is row rows[i] of this one; rows: int64."""
        chosen = CachedSequence()
        chosen.start = self.start
        chosen._entries = {
            name: _map(entry, lambda z: z.index_select(0, rows.to(z.device)))
            for name, entry in self._entries.items()
        }
        return chosen

    @property
    def nbytes(self) -> int:
        """Bytes of memory held for all layers, each piece of it counted once."""
        held: dict[int, int] = {}

        def count(z: Tensor) -> Tensor:
            storage = z.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
            return z

        for entry in self._entries.values():
            _map(entry, count)
        return sum(held.values())


def _map(entry: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """An entry with `function` applied to each of its tensors, all of them [B, ...]."""
    if isinstance(entry, Tensor):
        return function(entry)
    if isinstance(entry, tuple):
        return tuple(_map(one, function) for one in entry)
    return None if entry is None else entry.map(function)


def _last(z: Tensor, count: int) -> Tensor:
    """The last `count` tokens, in their own memory: a view would keep the whole prompt alive."""
    return z if z.shape[1] <= count else z[:, z.shape[1] - count :].clone()


def read(model: Backbone, input_ids: Tensor, cache: CachedSequence) -> Tensor:
    """Logits [B, T, V] of the next tokens input_ids [B, T], which the cache then holds."""
    logits: Tensor = model(input_ids, cache)
    cache.advance(input_ids.shape[1])
    return logits


def read_last(model: Backbone, input_ids: Tensor, cache: CachedSequence) -> Tensor:
    """Logits [B, V] of the token after input_ids [B, T], which the cache then holds; no others are formed."""
    logits: Tensor = model(input_ids, cache, last=True)  # by its front door: ZeRO-3 looks who comes in there
    cache.advance(input_ids.shape[1])
    return logits[:, -1]
