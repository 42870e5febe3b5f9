"""Softmax attention in parts: each part knows its log-sum-exp, so parts over different keys join exactly.

Queries [B, H, c, D], keys and values [B, H, t, D], any strides; log-sum-exp [B, H, c]. Keys and values may
have fewer heads, h: query head i then reads head i // (H / h). They are not repeated in memory.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def softmax_part(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the keys given, scale 1/sqrt(D); `causal`: the queries are those of the
    last keys."""
    if q.shape[1] != k.shape[1]:
        return _grouped_part(q, k, v, causal)
    if q.device.type == "cpu":
        output, log_sum = _flash_cpu(q, k, v, 0.0, **_causality(q, k, causal))
        return output, log_sum
    return softmax_part_by_matmul(q, k, v, causal)


def softmax_part_backward(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sum: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v through one part, given the output and log-sum-exp of all parts joined."""
    if q.shape[1] != k.shape[1]:
        return _grouped_part_backward(grad_output, q, k, v, output, log_sum, causal)
    if q.device.type == "cpu":
        given = grad_output, q, k, v, output, log_sum
        dq, dk, dv = _flash_cpu_backward(*given, 0.0, **_causality(q, k, causal))
        return dq, dk, dv
    return softmax_part_backward_by_matmul(grad_output, q, k, v, output, log_sum, causal)


def _grouped_part(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The queries that are first of their key's head, then the second, and so on."""
    output, log_sum = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3])
    group = q.shape[1] // k.shape[1]
    for place in range(group):
        of_place = slice(place, None, group)
        output[:, of_place], log_sum[:, of_place] = softmax_part(q[:, of_place], k, v, causal)
    return output, log_sum


def _grouped_part_backward(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sum: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of keys and values are summed over their queries' heads, in order."""
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    group = q.shape[1] // k.shape[1]
    sums: list[Tensor] = []
    for place in range(group):
        at = slice(place, None, group)
        given = grad_output[:, at], q[:, at], k, v, output[:, at], log_sum[:, at]
        dq[:, at], *more = softmax_part_backward(*given, causal)
        sums = more if not sums else [one.add_(other) for one, other in zip(sums, more, strict=True)]
    dk, dv = sums
    return dq, dk, dv


def _causality(q: Tensor, k: Tensor, causal: bool) -> dict[str, Any]:
    queries, keys = q.shape[2], k.shape[2]
    if not causal or queries == keys:  # the kernel's own causality counts from the first key
        return {"is_causal": causal}
    return {"is_causal": False, "attn_mask": _lower_right(queries, keys, q.dtype)}


@lru_cache(maxsize=8)
def _lower_right(queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    """[queries, keys] what is added to the scores."""
    return torch.full((queries, keys), -torch.inf, dtype=dtype, device="cpu").triu_(keys - queries + 1)


def join_parts(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of one softmax over all parts' keys."""
    output, log_sum = parts[0]
    for other, other_log_sum in parts[1:]:
        log_sum, weight = _joined_sums(log_sum, other_log_sum)
        output = torch.lerp(output, other, weight)
    return output, log_sum


def join_into(
    output: Tensor, log_sum: Tensor, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor] | None
) -> None:
    """Write what `join_parts` would return of one part, or two, of the accumulation dtype."""
    if second is None:
        output.copy_(first[0])
        log_sum.copy_(first[1])
        return
    joined, weight = _joined_sums(first[1], second[1])
    log_sum.copy_(joined)
    if output.dtype == weight.dtype:
        torch.lerp(first[0], second[0], weight, out=output)
    else:
        output.copy_(torch.lerp(first[0], second[0], weight))


def _joined_sums(log_sum: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of both, and the share [..., 1] of the other in it.

    Written out: `torch.logaddexp` rounds differently at a tensor's end, so that a head's bits would depend
    on how many others are beside it.
    """
    larger = torch.maximum(log_sum, other)
    joined = torch.minimum(log_sum, other).sub_(larger).exp_().log1p_().add_(larger)
    return joined, torch.sub(other, joined).exp_()[..., None]


def softmax_part_by_matmul(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`softmax_part` where no fused kernel hands out its log-sum-exp."""
    scores = _scores(q, k, causal)
    log_sum = scores.logsumexp(dim=-1)
    return scores.sub_(log_sum[..., None]).exp_() @ v, log_sum


def softmax_part_backward_by_matmul(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sum: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`softmax_part_backward` where there is no fused kernel."""
    weights = _scores(q, k, causal).sub_(log_sum[..., None]).exp_()
    dv = weights.transpose(2, 3) @ grad_output
    grad_scores = grad_output @ v.transpose(2, 3)
    grad_scores.sub_((grad_output * output).sum(dim=-1, keepdim=True)).mul_(weights).mul_(q.shape[-1] ** -0.5)
    return grad_scores @ k, grad_scores.transpose(2, 3) @ q, dv


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = (q @ k.transpose(2, 3)).mul_(q.shape[-1] ** -0.5)
    if causal:
        first_later = k.shape[2] - q.shape[2] + 1
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu_(first_later)
        scores.masked_fill_(later, -torch.inf)
    return scores
