"""Online vector quantisation: attention to the current chunk and to centroids of the chunks before it."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig, OVQConfig
from models.layers.attention import AttentionMixer, QueriesKeysValues
from models.layers.mixer import settings
from parallel.sequence.context import SequenceContext


class Centroids(NamedTuple):
    """m running means of keys and values, float32 at least."""

    keys: Tensor  # [B, H, m, D]
    values: Tensor  # [B, H, m, D]
    counts: Tensor  # [B, H, m] int32, tokens in each mean


class UnitNorm(nn.Module):
    """`x / (|x| + 1e-5)` over the last dim."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.norm(dim=-1, keepdim=True) + 1e-5)


class OVQ(AttentionMixer):
    """One softmax over the centroids, with log(count) added, and the chunk's own tokens, causally."""

    def __init__(self, model: ModelConfig, index: int) -> None:
        config = settings(model, index, OVQConfig)
        super().__init__(model, index, config.rotary(model.head_width))
        self.config = config
        self.projections.norm_query, self.projections.norm_key = UnitNorm(), UnitNorm()
        self.query_scale = nn.Parameter(torch.empty(model.num_heads))

    def attend(self, x: Tensor, heads: QueriesKeysValues, context: SequenceContext) -> Tensor:
        chunk = self.config.chunk
        opened = context.start % chunk  # tokens of the first chunk that earlier calls have read
        key, value = heads.key, heads.value
        before = context.halo(f"{self.name}.window", (key, value), 0, keep=chunk - 1)
        if opened:
            key, value = (
                torch.cat([kept[:, kept.shape[1] - opened :], own], dim=1)
                for kept, own in zip(before, (key, value), strict=True)
            )
        scale = self.query_scale * heads.query.shape[-1] ** 0.5
        query = heads.query * scale.unsqueeze(-1)
        query, key, value = (z.transpose(1, 2) for z in (query, key, value))  # [B, H, T, D]
        states, query = self._advance(query, key, value, context)
        outs = []
        for centroids, low in zip(states, range(0, key.shape[2], chunk), strict=False):
            own = slice(max(low - opened, 0), low + chunk - opened)
            part = slice(low, low + chunk)
            outs.append(read_chunk(query[:, :, own], key[:, :, part], value[:, :, part], centroids))
        return torch.cat(outs, dim=2).transpose(1, 2)

    def _advance(
        self, query: Tensor, key: Tensor, value: Tensor, context: SequenceContext
    ) -> tuple[list[Centroids], Tensor]:
        """The centroids that each chunk reads; those after the last complete chunk are handed on."""
        chunk = self.config.chunk
        position = context.start // chunk * chunk
        shape = (key.shape[0], key.shape[1], self.config.centroids_at(position))
        dtype = torch.promote_types(key.dtype, torch.float32)
        zeros = key.new_zeros(*shape, key.shape[-1], dtype=dtype)
        counts = key.new_zeros(shape, dtype=torch.int32)
        states = [Centroids(*context.receive(f"{self.name}.centroids", (zeros, zeros, counts)))]
        for low in range(0, key.shape[2] // chunk * chunk, chunk):
            part, position = slice(low, low + chunk), position + chunk
            size = self.config.centroids_at(position)
            states.append(quantise(states[-1], key[:, :, part].to(dtype), value[:, :, part].to(dtype), size))
        return states, context.send(f"{self.name}.centroids", tuple(states[-1]), tie=query)

    def initialise(self, generator: torch.Generator) -> None:
        super().initialise(generator)
        nn.init.ones_(self.query_scale)


def quantise(centroids: Centroids, keys: Tensor, values: Tensor, size: int) -> Centroids:
    """Fold a chunk of keys and values [B, H, C, D] into the centroids, which become `size` many.

    Keys join their most similar centroid (raw dot product), except the least similar ones, which open the new
    centroids. Gradients reach the means, not the choices.
    """
    if size == 0:  # the first chunk of one token, for example, opens none yet
        return centroids
    known = centroids.keys.shape[2]
    slot = _assign(centroids.keys.detach(), keys.detach(), size - known)  # [B, H, C]
    counts = F.pad(centroids.counts, (0, size - known))
    counts = counts.scatter_add(-1, slot, torch.ones_like(slot, dtype=torch.int32))
    index = slot.unsqueeze(-1).expand_as(keys)
    share = counts.gather(-1, slot).unsqueeze(-1).to(keys.dtype).reciprocal()

    def moved(means: Tensor, tokens: Tensor) -> Tensor:
        before = F.pad(means, (0, 0, 0, size - known))
        return before.scatter_add(-2, index, (tokens - before.gather(-2, index)) * share)

    return Centroids(moved(centroids.keys, keys), moved(centroids.values, values), counts)


def _assign(centroid_keys: Tensor, keys: Tensor, new: int) -> Tensor:
    """The centroid [B, H, C] of every key, new ones numbered after the known. Ties go to the first."""
    known = centroid_keys.shape[2]
    if known == 0:  # the first token opens the first centroid
        later = _assign(keys[:, :, :1], keys[:, :, 1:], new - 1)
        return F.pad(later, (1, 0))
    similarity, slot = (keys @ centroid_keys.transpose(-1, -2)).max(dim=-1)
    if new == 0:
        return slot
    opening = similarity.argsort(dim=-1, stable=True)[..., :new].sort(dim=-1).values
    numbers = torch.arange(known, known + new, device=keys.device).expand_as(opening)
    return slot.scatter(-1, opening, numbers)


def read_chunk(query: Tensor, key: Tensor, value: Tensor, centroids: Centroids) -> Tensor:
    """The last queries [B, H, Q, D] of a chunk of keys and values [B, H, n, D], Q <= n -> [B, H, Q, D]."""
    queries, tokens = query.shape[2], key.shape[2]
    causal = torch.ones(queries, tokens, dtype=torch.bool, device=query.device).tril(tokens - queries)
    own = torch.zeros(queries, tokens, dtype=query.dtype, device=query.device).masked_fill(
        ~causal, -torch.inf
    )
    log_counts = centroids.counts.to(centroids.keys.dtype).log().to(query.dtype).unsqueeze(2)  # [B, H, 1, m]
    both = (log_counts.expand(-1, -1, queries, -1), own.expand(*query.shape[:2], -1, -1))
    mask = torch.cat(both, dim=-1)  # [B, H, Q, m + n], added to the logits
    keys = torch.cat([centroids.keys.to(key.dtype), key], dim=2)
    values = torch.cat([centroids.values.to(value.dtype), value], dim=2)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=1.0)
