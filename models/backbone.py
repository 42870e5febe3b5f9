"""The GPTAlpha-2 backbone: embedding, blocks of a mixer and a feed-forward part, head."""

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.head import Head
from models.initialise import orthogonal_, uniform_
from models.layers.attention import NORM_EPS
from models.layers.feed_forward import FeedForward
from models.layers.mixer import build_mixer
from parallel.sequence.context import SequenceContext


class Block(nn.Module):
    """`x += s * mixer(norm(x))`, then `x += s * feed_forward(norm(x))`."""

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__()
        self.scale = model.depth_scale
        self.norm_mixer = nn.LayerNorm(model.hidden_size, eps=NORM_EPS)
        self.mixer = build_mixer(model, index)
        self.norm_feed_forward = nn.LayerNorm(model.hidden_size, eps=NORM_EPS)
        self.feed_forward = FeedForward(model, index)

    def first_value(self, x0: Tensor, context: SequenceContext) -> Tensor:
        """What this block's mixer, the first of its kind, gives to all of its kind."""
        return self.mixer.first_value(self.norm_mixer(x0), context)

    def forward(self, x: Tensor, first_value: Tensor, context: SequenceContext) -> Tensor:
        x = x + self.scale * self.mixer(self.norm_mixer(x), first_value, context)
        return x + self.scale * self.feed_forward(self.norm_feed_forward(x), context)


class Backbone(nn.Module):
    """A causal language model over the layer pattern of its config."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm_embedding = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_layers))
        self.norm_head = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.head = Head(config.hidden_size, config.vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        context: SequenceContext,
        labels: Tensor | None = None,
        loss_chunk: int | None = None,
        each: bool = False,
        last: bool = False,
    ) -> Tensor:
        """input_ids [B, T] int64, standing at positions context.start, ... -> logits [B, T, V]; with `last`
        those after the last token alone, [B, 1, V].

        With labels [B, T] the sum of the losses against them, 0-dim, or with `each` the loss of every token,
        [B, T]: of `loss_chunk` tokens at a time, so that the logits of all tokens are never there at once.
        """
        features = self.features(input_ids, context)
        return self.head(features[:, -1:] if last else features, labels, loss_chunk, each)

    def features(self, input_ids: Tensor, context: SequenceContext) -> Tensor:
        """What the head reads: input_ids [B, T] -> [B, T, d], normed."""
        x0 = self.norm_embedding(self.embedding(input_ids))
        x = x0
        first_values: dict[str, Tensor] = {}
        for kind, block in zip(self.config.layer_kinds, self.layers, strict=True):
            assert isinstance(block, Block)
            if kind not in first_values:
                first_values[kind] = block.first_value(x0, context)
            x = block(x, first_values[kind], context)
        return self.norm_head(x)

    def initialise(self, generator: torch.Generator) -> None:
        uniform_(self.embedding.weight, 1e-4, generator)
        gain = 0.5 * (self.config.vocab_size / self.config.hidden_size) ** 0.5
        orthogonal_(self.head.weight, gain, generator)
