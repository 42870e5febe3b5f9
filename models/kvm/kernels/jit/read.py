"""Reads: one softmax over all slots and the causal window, for every block of a launch at once."""

import triton
import triton.language as tl

from models.kvm.kernels.jit.rows import LN2, LOG2E, kernel, load_rows, split_row, store_rows


@triton.jit
def temperature(p_temperature, i_head, TEMPERED: tl.constexpr):
    if TEMPERED:
        return tl.load(p_temperature + i_head).to(tl.float32)
    return 1.0


@triton.jit
def softmax_tile(b_o, highest, total, b_s, b_v, PRECISION: tl.constexpr):
    """Takes one tile of scores (log2) and values into a running softmax."""
    new_highest = tl.maximum(highest, tl.max(b_s, 1))
    shrink = tl.exp2(highest - new_highest)
    b_p = tl.exp2(b_s - new_highest[:, None])
    total = total * shrink + tl.sum(b_p, 1)
    b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * shrink[:, None], input_precision=PRECISION)
    return b_o, new_highest, total


@kernel
def read_kernel(
    p_q, p_k, p_v, p_read_keys, p_read_values, p_state_temperature, p_window_temperature, p_o, p_log_sum,
    p_blocks, first_snapshot, snapshot_slots, row0, heads, queries, tokens, scale,
    TEMPERED: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o, as q, and its log-sum-exp [query rows, T]; grid (blocks * tiles, query rows).

    q [B, T, GROUP * H, D]; k, v [B, t, H, D] with the tokens before the call; blocks [., 5] first query, last
    query + 1, first key, slots, snapshot.
    """
    TILES: tl.constexpr = (C + BLOCK_M - 1) // BLOCK_M
    i_row, rows = (tl.program_id(1) // GROUP).to(tl.int64), tl.num_programs(1) // GROUP
    query_row = row0 * GROUP + tl.program_id(1).to(tl.int64)
    batch, head = split_row(row0 + i_row, heads)
    _, query_head = split_row(query_row, heads * GROUP)
    p_blocks += 5 * (tl.program_id(0) // TILES)
    start = tl.load(p_blocks) + (tl.program_id(0) % TILES) * BLOCK_M
    stop = tl.minimum(tl.load(p_blocks + 1), start + BLOCK_M)
    i_key, slots = tl.load(p_blocks + 2), tl.load(p_blocks + 3)
    o_m = start + tl.arange(0, BLOCK_M)
    o_head = batch * heads * D
    o_query = o_head * GROUP * queries + query_head * D
    b_q = load_rows(p_q + o_query, o_m, o_m < stop, heads * GROUP * D, D, BLOCK_D)
    b_o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    slots = tl.where(start < stop, slots, 0)
    o_snapshot = (tl.load(p_blocks + 4) - first_snapshot).to(tl.int64) * rows + i_row
    p_read_keys += o_snapshot * snapshot_slots * D
    p_read_values += o_snapshot * snapshot_slots * D
    log2_scale = scale * LOG2E * temperature(p_state_temperature, head, TEMPERED)
    for i_n in range(0, slots, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_k = load_rows(p_read_keys, o_n, o_n < slots, D, D, BLOCK_D)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * log2_scale
        b_s = tl.where((o_n < slots)[None, :], b_s, float("-inf"))
        b_v = load_rows(p_read_values, o_n, o_n < slots, D, D, BLOCK_D)
        b_o, highest, total = softmax_tile(b_o, highest, total, b_s, b_v, PRECISION)
    o_head = o_head * tokens + head * D
    log2_scale = scale * LOG2E * temperature(p_window_temperature, head, TEMPERED)
    shift = tokens - queries  # keys before the call
    i_key = tl.where(start < stop, i_key, stop + shift)
    for i_n in range(i_key, stop + shift, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_k = load_rows(p_k + o_head, o_n, o_n < stop + shift, heads * D, D, BLOCK_D)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * log2_scale
        b_s = tl.where(o_n[None, :] <= (o_m + shift)[:, None], b_s, float("-inf"))
        b_v = load_rows(p_v + o_head, o_n, o_n < stop + shift, heads * D, D, BLOCK_D)
        b_o, highest, total = softmax_tile(b_o, highest, total, b_s, b_v, PRECISION)
    b_o = b_o / total[:, None]
    store_rows(p_o + o_query, o_m, o_m < stop, b_o, heads * GROUP * D, D, BLOCK_D)
    tl.store(p_log_sum + query_row * queries + o_m, highest * LN2 + tl.log(total), mask=o_m < stop)
