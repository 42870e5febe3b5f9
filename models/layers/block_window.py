"""Causal attention over blocks: the current one, those shortly before it, and the first tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import BlockWindowConfig, ModelConfig
from models.layers.attention import AttentionMixer, QueriesKeysValues
from models.layers.blocked_attention import blocked_attention
from models.layers.mixer import settings
from parallel.sequence.context import SequenceContext


class BlockWindow(AttentionMixer):
    """Token t sees tokens whose chunk is at most window_chunks - 1 back, and the first `sinks` tokens."""

    def __init__(self, model: ModelConfig, index: int) -> None:
        config = settings(model, index, BlockWindowConfig)
        super().__init__(model, index, config.rotary(model.head_width))
        self.chunk, self.sinks = config.chunk, config.sinks
        self.reach = (config.window_chunks - 1) * config.chunk

    def attend(self, x: Tensor, heads: QueriesKeysValues, context: SequenceContext) -> Tensor:
        # A later call may start inside a block and then needs the block's own first tokens too.
        kept = self.reach + self.chunk - 1
        key, value = context.halo(f"{self.name}.window", (heads.key, heads.value), self.reach, keep=kept)
        sinks = None
        if self.sinks:
            heads, sinks = self._first_tokens(heads, context)
        return blocked_attention(
            heads,
            (key, value),
            context.start,
            self.chunk,
            self.reach,
            oldest=lambda position: position // self.chunk * self.chunk - self.reach,
            sinks=sinks,
        )

    def _first_tokens(
        self, heads: QueriesKeysValues, context: SequenceContext
    ) -> tuple[QueriesKeysValues, tuple[Tensor, Tensor]]:
        """Keys and values [B, sinks, H, D] of the sequence's first tokens, zeros for those to come."""
        name, start = f"{self.name}.sinks", context.start
        zeros = heads.key.new_zeros(heads.key.shape[0], self.sinks, *heads.key.shape[2:])
        known = context.receive(name, (zeros, zeros))
        if start < self.sinks:
            known = tuple(
                _fill(sink, z, start) for sink, z in zip(known, (heads.key, heads.value), strict=True)
            )
        query = context.send(name, known, tie=heads.query)
        return heads._replace(query=query), (known[0], known[1])


def _fill(sinks: Tensor, own: Tensor, start: int) -> Tensor:
    """sinks with tokens from position `start` on taken from own."""
    filled = torch.cat([sinks[:, :start], own[:, : sinks.shape[1] - start]], dim=1)
    return F.pad(filled, (0, 0, 0, 0, 0, sinks.shape[1] - filled.shape[1]))
