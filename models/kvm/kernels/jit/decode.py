"""One token against the slots and the window: pieces of the keys in parallel, joined in a fixed order."""

import triton
import triton.language as tl

from models.kvm.kernels.jit.read import temperature
from models.kvm.kernels.jit.rows import (
    LOG2E,
    kernel,
    layer_norm,
    load_rows,
    load_vector,
    read_scale,
    split_row,
)


@triton.jit
def take(b_o, highest, total, b_s, b_v):
    """Takes scores [N] (log2) and values [N, D] into a running softmax."""
    new_highest = tl.maximum(highest, tl.max(b_s, 0))
    shrink = tl.exp2(highest - new_highest)
    b_p = tl.exp2(b_s - new_highest)
    return b_o * shrink + tl.sum(b_p[:, None] * b_v, 0), new_highest, total * shrink + tl.sum(b_p, 0)


@triton.jit
def token_row(
    p_window, p_token, o_window, o_token, kept, KEEP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """A row [D] of the token in float32, with KEEP its first `kept` columns are stored behind the window."""
    o_d = tl.arange(0, BLOCK_D)
    b_token = tl.load(p_token + o_token + o_d, mask=o_d < D, other=0.0)
    if KEEP:
        tl.store(p_window + o_window + o_d, b_token, mask=o_d < kept)
    return b_token.to(tl.float32)


@kernel
def decode_kernel(
    p_q, p_keys, p_values, p_magnitudes, p_window_k, p_window_v, p_window_gate, p_k, p_v, p_gate, p_weight,
    p_bias, p_state_temperature, p_window_temperature, p_pieces, slots, all_slots, held, room, heads,
    per_piece, scale, TEMPERED: tl.constexpr, RADIUS: tl.constexpr, GATE: tl.constexpr, KEEP: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The token's q [B, 1, GROUP * H, D] and k, v [B, 1, H, D], after the slots and the window.

    Sums [B, H, all_slots, .], normed as they are read; window [B, room, H, D], of which `held` tokens are
    there: KEEP adds the token behind them. The last piece reads the token itself. Writes [pieces, query rows,
    D + 2]: the piece's output, its highest score, its total; grid (pieces, query rows).
    """
    query_row = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(1) // GROUP).to(tl.int64)
    batch, head = split_row(row, heads)
    o_d = tl.arange(0, BLOCK_D)
    b_q = load_vector(p_q + query_row * D, D, BLOCK_D).to(tl.float32)
    b_o = tl.zeros([BLOCK_D], tl.float32)
    highest, total = -1.0e30, 0.0
    begin = tl.program_id(0) * per_piece
    end = tl.minimum(begin + per_piece, slots + held)
    log2_scale = scale * LOG2E * temperature(p_state_temperature, head, TEMPERED)
    for i_n in range(begin, tl.minimum(end, slots), BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        m_n = o_n < tl.minimum(end, slots)
        b_k = load_rows(p_keys + row * all_slots * D, o_n, m_n, D, D, BLOCK_D)
        b_k = layer_norm(b_k, p_weight, p_bias, D, BLOCK_D)
        b_s = tl.where(m_n, tl.sum(b_k * b_q[None, :], 1) * log2_scale, float("-inf"))
        b_v = load_rows(p_values + row * all_slots * D, o_n, m_n, D, D, BLOCK_D)
        magnitudes = tl.load(p_magnitudes + row * all_slots + o_n, mask=m_n, other=1.0)
        b_v *= read_scale(b_v, magnitudes, RADIUS)[:, None]
        b_o, highest, total = take(b_o, highest, total, b_s, b_v)
    log2_scale = scale * LOG2E * temperature(p_window_temperature, head, TEMPERED)
    o_head = (batch * room * heads + head) * D
    for i_n in range(tl.maximum(begin - slots, 0), end - slots, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        m_n = o_n < end - slots
        b_k = load_rows(p_window_k + o_head, o_n, m_n, heads * D, D, BLOCK_D).to(tl.float32)
        b_s = tl.where(m_n, tl.sum(b_k * b_q[None, :], 1) * log2_scale, float("-inf"))
        b_v = load_rows(p_window_v + o_head, o_n, m_n, heads * D, D, BLOCK_D).to(tl.float32)
        b_o, highest, total = take(b_o, highest, total, b_s, b_v)
    is_last = tl.program_id(0) == tl.num_programs(0) - 1
    kept = tl.where(is_last, tl.where(query_row == row * GROUP, D, 0), 0)
    o_held = o_head + held.to(tl.int64) * heads * D
    b_k = token_row(p_window_k, p_k, o_held, row * D, kept, KEEP, D, BLOCK_D)
    b_v = token_row(p_window_v, p_v, o_held, row * D, kept, KEEP, D, BLOCK_D)
    if GATE and KEEP:
        o_gate = (batch * room + held) * heads + head
        tl.store(p_window_gate + o_gate, tl.load(p_gate + row), mask=kept > 0)
    b_s = tl.where(is_last, tl.sum(b_k * b_q, 0) * log2_scale, float("-inf"))
    new_highest = tl.maximum(highest, b_s)
    shrink, b_p = tl.exp2(highest - new_highest), tl.exp2(b_s - new_highest)
    b_o, total = b_o * shrink + b_p * b_v, total * shrink + b_p
    p_pieces += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + query_row) * (D + 2)
    tl.store(p_pieces + o_d, b_o, mask=o_d < D)
    tl.store(p_pieces + D, new_highest)
    tl.store(p_pieces + D + 1, total)


@kernel
def join_pieces_kernel(p_pieces, p_o, pieces, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """o [B, 1, H, D] of the pieces; grid (B * H,)."""
    row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    b_o = tl.zeros([BLOCK_D], tl.float32)
    highest, total = -1.0e30, 0.0
    for i in range(pieces):
        p_piece = p_pieces + (row + tl.num_programs(0).to(tl.int64) * i) * (D + 2)
        other = tl.load(p_piece + D)
        new_highest = tl.maximum(highest, other)
        shrink, grow = tl.exp2(highest - new_highest), tl.exp2(other - new_highest)
        b_o = b_o * shrink + load_vector(p_piece, D, BLOCK_D) * grow
        total = total * shrink + tl.load(p_piece + D + 1) * grow
        highest = new_highest
    tl.store(p_o + row * D + o_d, (b_o / total).to(p_o.dtype.element_ty), mask=o_d < D)
