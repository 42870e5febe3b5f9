"""Softmax attention in parts: each part knows its log-sum-exp, so parts over different keys join exactly.

Queries [B, H, c, D], keys and values [B, H, t, D], any strides; log-sum-exp [B, H, c].
"""

import torch
from torch import Tensor

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def softmax_part(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the keys given, scale 1/sqrt(D); `causal` wants as many keys as queries."""
    if q.device.type == "cpu":
        output, log_sum = _flash_cpu(q, k, v, 0.0, causal)
        return output, log_sum
    return softmax_part_by_matmul(q, k, v, causal)


def softmax_part_backward(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sum: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v through one part, given the output and log-sum-exp of all parts joined."""
    if q.device.type == "cpu":
        dq, dk, dv = _flash_cpu_backward(grad_output, q, k, v, output, log_sum, 0.0, causal)
        return dq, dk, dv
    return softmax_part_backward_by_matmul(grad_output, q, k, v, output, log_sum, causal)


def join_parts(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of one softmax over all parts' keys."""
    output, first_log_sum = parts[0]
    if len(parts) == 1:
        return output, first_log_sum
    log_sum = first_log_sum
    for _, other_log_sum in parts[1:]:
        log_sum = torch.logaddexp(log_sum, other_log_sum)
    output = output * (first_log_sum - log_sum).exp_()[..., None]
    for other, other_log_sum in parts[1:]:
        output.addcmul_(other, (other_log_sum - log_sum).exp_()[..., None])
    return output, log_sum


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
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(later, -torch.inf)
    return scores
