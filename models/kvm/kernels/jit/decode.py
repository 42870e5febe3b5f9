"""One token against the slots and the window: pieces of the keys in parallel, joined in a fixed order."""

import triton
import triton.language as tl

from models.kvm.kernels.jit.read import temperature
from models.kvm.kernels.jit.rows import LOG2E, layer_norm, load_rows, load_vector, read_scale, split_row


@triton.jit
def take(b_o, highest, total, b_s, b_v):
    """Takes scores [N] (log2) and values [N, D] into a running softmax."""
    new_highest = tl.maximum(highest, tl.max(b_s, 0))
    shrink = tl.exp2(highest - new_highest)
    b_p = tl.exp2(b_s - new_highest)
    return b_o * shrink + tl.sum(b_p[:, None] * b_v, 0), new_highest, total * shrink + tl.sum(b_p, 0)


@triton.jit
def decode_kernel(
    p_q, p_keys, p_values, p_magnitudes, p_k, p_v, p_weight, p_bias, p_state_temperature,
    p_window_temperature, p_pieces, slots, all_slots, first_key, tokens, heads, per_piece, scale,
    TEMPERED: tl.constexpr, RADIUS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """q [B, 1, H, D]; sums [B, H, all_slots, .] normed as they are read; k, v [B, tokens, H, D].

    Writes [pieces, B * H, D + 2]: the piece's output, its highest score, its total; grid (pieces, B * H).
    """
    row = tl.program_id(1).to(tl.int64)
    batch, head = split_row(row, heads)
    o_d = tl.arange(0, BLOCK_D)
    b_q = load_vector(p_q + row * D, D, BLOCK_D).to(tl.float32)
    b_o = tl.zeros([BLOCK_D], tl.float32)
    highest, total = -1.0e30, 0.0
    begin = tl.program_id(0) * per_piece
    end = begin + per_piece
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
    o_head = (batch * tokens * heads + head) * D
    stop = tl.minimum(end - slots + first_key, tokens)
    for i_n in range(tl.maximum(begin - slots, 0) + first_key, stop, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_k = load_rows(p_k + o_head, o_n, o_n < stop, heads * D, D, BLOCK_D).to(tl.float32)
        b_s = tl.where(o_n < stop, tl.sum(b_k * b_q[None, :], 1) * log2_scale, float("-inf"))
        b_v = load_rows(p_v + o_head, o_n, o_n < stop, heads * D, D, BLOCK_D).to(tl.float32)
        b_o, highest, total = take(b_o, highest, total, b_s, b_v)
    p_pieces += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + row) * (D + 2)
    tl.store(p_pieces + o_d, b_o, mask=o_d < D)
    tl.store(p_pieces + D, highest)
    tl.store(p_pieces + D + 1, total)


@triton.jit
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
