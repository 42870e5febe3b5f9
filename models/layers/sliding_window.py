"""Causal attention over the last tokens."""

from torch import Tensor

from models.config import ModelConfig, SlidingWindowConfig
from models.layers.attention import AttentionMixer, QueriesKeysValues
from models.layers.blocked_attention import blocked_attention
from models.layers.mixer import settings
from parallel.sequence.context import SequenceContext


class SlidingWindow(AttentionMixer):
    """Token t sees tokens [t - window + 1, t]."""

    def __init__(self, model: ModelConfig, index: int) -> None:
        config = settings(model, index, SlidingWindowConfig)
        super().__init__(model, index, config.rotary(model.head_width))
        self.window = config.window

    def attend(self, x: Tensor, heads: QueriesKeysValues, context: SequenceContext) -> Tensor:
        key, value = context.halo(f"{self.name}.window", (heads.key, heads.value), self.window - 1)
        return blocked_attention(
            heads,
            (key, value),
            context.start,
            block=self.window,
            reach=self.window,
            oldest=lambda position: position - self.window + 1,
        )
