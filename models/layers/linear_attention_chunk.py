"""Linear attention with decay in matmuls over chunks: Mamba-2 (a decay per head), GLA (per channel).

Per head, with state S [K, V]: `S_t = diag(w_t) S_{t-1} + k_t v_t^T`, read `o_t = S_t^T q_t`. With G the
running sum of log w inside a chunk, S the state before it, A the causal `sum q_i k_j exp(G_i - G_j)`:

    S' = exp(G_C) S + k^^T v,     k^_t = k_t exp(G_C - G_t)
    o  = q~ S + A v,              q~_t = q_t exp(G_t)

(arXiv 2405.21060 and 2312.06635).
"""

from torch import Tensor

from models.layers.chunk_recurrence import ChunkMaps, in_chunks, running_sum
from models.layers.decayed_scores import decayed_scores


def chunk_maps(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor) -> ChunkMaps:
    """query, key [B, T, H or 1, K], value [B, T, H, V], log_decay [B, T, H, K or 1], float32 or float64.
    Queries come scaled.

    A short last chunk is filled up with tokens that leave the state as it is.
    """
    q, k, v, log_decay = (in_chunks(z) for z in (query, key, value, log_decay))
    total = running_sum(log_decay.double())
    scores = decayed_scores(q.unsqueeze(-3), k, total).squeeze(-3)
    since_start = total.to(q.dtype).exp()
    until_end = (total[..., -1:, :] - total).to(q.dtype).exp()
    return ChunkMaps(
        transition=since_start[..., -1, :, None].clone(),  # not the whole of it alive in the backward
        inflow=(k * until_end).transpose(-1, -2) @ v,
        readout=q * since_start,
        local=scores @ v,
    )
