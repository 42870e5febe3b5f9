"""Causal attention over all tokens."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import FullAttentionConfig, ModelConfig
from models.kvm.softmax_part import join_parts, softmax_part, softmax_part_backward
from models.layers.attention import AttentionMixer, QueriesKeysValues
from models.layers.mixer import settings
from parallel.sequence.context import SequenceContext

UNFUSED_QUERIES = 512  # read at once where scores are written out: [B, H, 512, K] in float32


class FullAttention(AttentionMixer):
    """Softmax attention to every earlier token, scale 1/sqrt(D)."""

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__(model, index, settings(model, index, FullAttentionConfig).rotary(model.head_width))

    def attend(self, x: Tensor, heads: QueriesKeysValues, context: SequenceContext) -> Tensor:
        fused = heads.query.device.type == "cpu"
        attention = SoftmaxAttention() if fused else SoftmaxAttention(UNFUSED_QUERIES, torch.float32)
        return context.attend(f"{self.name}.window", attention, *heads)


@dataclass(frozen=True)
class SoftmaxAttention:
    """`CausalAttention`, scale 1/sqrt(D). log-sum-exps: [B, H, Q].

    queries: read at once in a part, None for all. part_dtype: of parts, if that is more precise than theirs.
    """

    queries: int | None = None
    part_dtype: torch.dtype | None = None

    def whole(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        earlier = key.shape[1] - query.shape[1]
        mask = None
        if earlier:
            shape = (query.shape[1], key.shape[1])
            mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(earlier)
        query, key, value = (z.transpose(1, 2) for z in (query, key, value))  # [B, H, T, D]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=not earlier)
        return out.transpose(1, 2)

    def part(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        query, key, value = self._by_head(query, key, value)
        blocks = [
            softmax_part(query[:, :, own], key[:, :, seen], value[:, :, seen], causal)
            for own, seen in self._blocks(query, key, causal)
        ]
        outputs, log_sums = zip(*blocks, strict=True)
        return torch.cat(outputs, dim=2).transpose(1, 2), torch.cat(log_sums, dim=2)

    def join(self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(one[0].dtype, torch.float32)
        parts = [(output.transpose(1, 2).to(dtype), log_sum) for output, log_sum in (one, other)]
        output, log_sum = join_parts(parts)
        return output.transpose(1, 2), log_sum

    def part_backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient, query, key, value, output = self._by_head(gradient, query, key, value, output)
        dquery, dkey, dvalue = (torch.zeros_like(z) for z in (query, key, value))
        for own, seen in self._blocks(query, key, causal):
            found = softmax_part_backward(
                gradient[:, :, own],
                query[:, :, own],
                key[:, :, seen],
                value[:, :, seen],
                output[:, :, own],
                log_sum[:, :, own],
                causal,
            )
            for total, rows, one in zip((dquery, dkey, dvalue), (own, seen, seen), found, strict=True):
                total[:, :, rows] += one
        return dquery.transpose(1, 2), dkey.transpose(1, 2), dvalue.transpose(1, 2)

    def _by_head(self, *tensors: Tensor) -> list[Tensor]:
        """[B, T, H, D] -> [B, H, T, D] in the dtype of parts."""
        dtype = tensors[0].dtype
        if self.part_dtype is not None:
            dtype = torch.promote_types(dtype, self.part_dtype)
        return [z.transpose(1, 2).to(dtype) for z in tensors]

    def _blocks(self, query: Tensor, key: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
        """Which queries are read at once, and which of the keys they see."""
        tokens = query.shape[2]
        step = self.queries or tokens
        for start in range(0, tokens, step):
            stop = min(start + step, tokens)
            yield slice(start, stop), slice(0, stop if causal else key.shape[2])
