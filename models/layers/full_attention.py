"""Causal attention over all tokens."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import FullAttentionConfig, ModelConfig
from models.layers.attention import AttentionMixer, QueriesKeysValues
from models.layers.mixer import settings
from parallel.sequence.context import SequenceContext

ALL_TOKENS = sys.maxsize


class FullAttention(AttentionMixer):
    """Softmax attention to every earlier token, scale 1/sqrt(D)."""

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__(model, index, settings(model, index, FullAttentionConfig).rotary(model.head_width))

    def attend(self, x: Tensor, heads: QueriesKeysValues, context: SequenceContext) -> Tensor:
        if context.exchange.has_previous or context.exchange.has_next:
            raise ValueError(
                f"layer {self.index} is {self.kind}, which cannot read a sequence split over ranks yet; "
                "set parallel.sequence=1 or use layers that can (kvm, rwkv7, sliding_window)"
            )
        query, key, value = (z.transpose(1, 2) for z in heads)  # [B, H, T, D]
        before = context.halo(f"{self.name}.window", (heads.key, heads.value), ALL_TOKENS)
        earlier = before[0].shape[1]
        key = torch.cat([before[0].transpose(1, 2), key], dim=2)
        value = torch.cat([before[1].transpose(1, 2), value], dim=2)
        mask = None
        if earlier:
            shape = (query.shape[2], key.shape[2])
            mask = torch.ones(shape, dtype=torch.bool, device=x.device).tril(earlier)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=not earlier)
        return out.transpose(1, 2)
