"""What a model keeps of the tokens it has read, so that the next call goes on where the last one ended."""

from typing import Any

import torch
from torch import Tensor

from models.backbone import Backbone
from parallel.sequence.context import Exchange, NoExchange


class CachedSequence:
    """A sequence read in calls of any length, each of which sees all tokens before it.

    Every layer keeps one entry per name: a typed state, a recurrent state, or the last tokens of a halo, as
    many as that name asks for. `start` moves only between calls, so all layers of one call agree on it.
    """

    exchange: Exchange = NoExchange()
    keeps_state = True

    def __init__(self) -> None:
        self.start = 0
        self._entries: dict[str, Any] = {}

    def halo(self, name: str, tensors: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
        before = self._entries.get(name, tuple(z[:, :0] for z in tensors))
        pairs = zip(before, tensors, strict=True)
        self._entries[name] = tuple(_last(torch.cat(pair, dim=1), count) for pair in pairs)
        return before

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


def _last(z: Tensor, count: int) -> Tensor:
    """The last `count` tokens, in their own memory: a view would keep the whole prompt alive."""
    return z if z.shape[1] <= count else z[:, z.shape[1] - count :].clone()


def read(model: Backbone, input_ids: Tensor, cache: CachedSequence) -> Tensor:
    """Logits [B, T, V] of the next tokens input_ids [B, T], which the cache then holds."""
    logits: Tensor = model(input_ids, cache)
    cache.advance(input_ids.shape[1])
    return logits
