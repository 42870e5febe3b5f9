"""The delta rule with decay in matmuls over chunks: DeltaNet (none), Gated DeltaNet (a head), KDA (channels).

Per head, with state S [K, V]: `S_t = diag(w_t) S_{t-1}`, then `S_t += beta_t k_t (v_t - S_t^T k_t)^T`, read
`o_t = S_t^T q_t`. With G the running sum of log w inside a chunk and S the state before it, the values d that
the chunk writes solve a triangular system and are affine in S, as are the state after it and the reads:

    (I + diag(beta) A_kk) d = beta (v - k~ S),     k~_t = k_t exp(G_t)
    S' = exp(G_C) S + k^^T d,                      k^_t = k_t exp(G_C - G_t)
    o  = q~ S + A_qk d,                            q~_t = q_t exp(G_t)

A_xk holds `sum x_i k_j exp(G_i - G_j)`, j < i for k and j <= i for q (arXiv 2412.06464 and 2510.26692).
"""

import torch
from torch import Tensor

from models.layers.chunk_recurrence import ChunkMaps, in_chunks, running_sum
from models.layers.decayed_scores import decayed_scores


def chunk_maps(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor) -> ChunkMaps:
    """query, key [B, T, H, K], value [B, T, H, V], log_decay [B, T, H, K or 1], rate [B, T, H, 1] (beta),
    float32 or float64. Queries come scaled.

    A short last chunk is filled up with tokens that leave the state as it is.
    """
    q, k, v, log_decay, rate = (in_chunks(z) for z in (query, key, value, log_decay, rate))
    total = running_sum(log_decay.double())
    scores = decayed_scores(torch.stack([k, q], dim=-3), k, total)
    of_keys, of_queries = scores.unbind(-3)
    since_start = total.to(q.dtype).exp()
    until_end = (total[..., -1:, :] - total).to(q.dtype).exp()
    identity = torch.eye(q.shape[-2], dtype=q.dtype, device=q.device)
    right = rate * torch.cat([k * since_start, v], dim=-1)
    system = identity + rate * of_keys.tril(-1)
    written = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    key_width = k.shape[-1]
    to_state, to_reads = (k * until_end).transpose(-1, -2) @ written, of_queries @ written
    kept = torch.eye(key_width, dtype=q.dtype, device=q.device) * since_start[..., -1, :, None]
    return ChunkMaps(
        transition=kept - to_state[..., :key_width],
        inflow=to_state[..., key_width:],
        readout=q * since_start - to_reads[..., :key_width],
        local=to_reads[..., key_width:],
    )
