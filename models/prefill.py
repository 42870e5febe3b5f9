"""A prompt read on several ranks at once, so that the last of them goes on from it."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from models.backbone import Backbone
from models.cache import ALL_TOKENS, CachedSequence
from parallel.sequence.context import CausalAttention, SequenceContext


def prefill(
    model: Backbone, input_ids: Tensor, shard: SequenceContext
) -> tuple[Tensor, CachedSequence | None]:
    """Read this rank's tokens of a prompt, input_ids [B, T], standing at shard.start, ....

    Returns their logits [B, T, V] and, on the rank that holds the prompt's end, the cache after it: what one
    rank would have that read the whole prompt. Works without gradients only.
    """
    context = PrefillShard(shard)
    logits: Tensor = model(input_ids, context)
    if not context.keeps_state:
        return logits, None
    context.cache.advance(shard.start + input_ids.shape[1])
    return logits, context.cache


class PrefillShard:
    """The `SequenceContext` of a prompt's shard: relays as `shard` does, and keeps in `cache` on the last.

    The last rank needs the state of all heads, so a node splits no more than routing.
    """

    def __init__(self, shard: SequenceContext) -> None:
        self.start, self.exchange, self.head_split = shard.start, shard.exchange, shard.head_split
        if self.head_split.node is not None:
            node = replace(self.head_split.node, splits="routing")
            self.head_split = replace(self.head_split, node=node)
        self.keeps_state = not shard.exchange.has_next
        self.cache = CachedSequence()
        self._shard = shard

    def halo(
        self, name: str, tensors: tuple[Tensor, ...], count: int, keep: int | None = None
    ) -> tuple[Tensor, ...]:
        before = self._shard.halo(name, tensors, count)
        if self.keeps_state:
            self.cache.keep(name, before, tensors, count if keep is None else keep)
        return before

    def attend(
        self, name: str, attention: CausalAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        output = self._shard.attend(name, attention, query, key, value)
        before = self._shard.halo(f"{name}.kept", (key, value), ALL_TOKENS)
        if self.keeps_state:
            self.cache.keep(name, before, (key, value), ALL_TOKENS)
        return output

    def receive(self, name: str, zeros: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._shard.receive(name, zeros)

    def send(self, name: str, state: tuple[Tensor, ...], tie: Tensor) -> Tensor:
        if self.keeps_state:
            self.cache.send(name, state, tie)
        return self._shard.send(name, state, tie)

    def load(self, name: str) -> Any:
        return None

    def store(self, name: str, state: Any) -> None:
        if self.keeps_state:
            self.cache.store(name, state)
