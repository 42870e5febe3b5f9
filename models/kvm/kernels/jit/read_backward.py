"""Backward of reads: one kernel per side, each recomputes the weights from the log-sum-exp.

Every program owns what it writes, so nothing is added atomically and runs repeat bit for bit.
"""

import triton
import triton.language as tl

from models.kvm.kernels.jit.read import temperature
from models.kvm.kernels.jit.rows import (
    LOG2E,
    SMALLEST_NORM,
    kernel,
    load_rows,
    load_vector,
    read_scale,
    split_row,
    standardise,
    standardise_backward,
    store_rows,
)


@kernel
def delta_kernel(
    p_o, p_do, p_delta, heads, queries, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """delta [B, H, T] = sum over D of o * do, of the queries' heads; grid (tiles, B * H)."""
    row = tl.program_id(1).to(tl.int64)
    batch, head = split_row(row, heads)
    o_m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_head = (batch * queries * heads + head) * D
    b_o = load_rows(p_o + o_head, o_m, o_m < queries, heads * D, D, BLOCK_D).to(tl.float32)
    b_do = load_rows(p_do + o_head, o_m, o_m < queries, heads * D, D, BLOCK_D).to(tl.float32)
    tl.store(p_delta + row * queries + o_m, tl.sum(b_o * b_do, 1), mask=o_m < queries)


@triton.jit
def query_tile(
    b_dq, dtemperature, b_q, b_do, log_sum, delta, b_k, b_v, visible, scale, tempered, PRECISION: tl.constexpr
):  # fmt: skip
    """Adds what one tile of keys and values gives to dq / scale and to each query's share of dtemperature."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_p = tl.exp2(b_s * (scale * tempered * LOG2E) - log_sum[:, None])
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    b_ds = tl.where(visible, b_p * (b_dp - delta[:, None]), 0.0)
    dtemperature += tl.sum(b_ds * b_s, 1)
    b_dq = tl.dot((b_ds * tempered).to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    return b_dq, dtemperature


@kernel
def read_backward_queries_kernel(
    p_q, p_k, p_v, p_read_keys, p_read_values, p_state_temperature, p_window_temperature, p_do, p_log_sum,
    p_delta, p_dq, p_dtemperatures, p_blocks, first_snapshot, snapshot_slots, row0, heads, queries, tokens,
    scale, TEMPERED: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, and per program its queries' share in the gradients of two temperatures; the grid of reads."""
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
    m_m = o_m < stop
    o_head = batch * heads * D
    o_query = o_head * GROUP * queries + query_head * D
    b_q = load_rows(p_q + o_query, o_m, m_m, heads * GROUP * D, D, BLOCK_D)
    b_do = load_rows(p_do + o_query, o_m, m_m, heads * GROUP * D, D, BLOCK_D)
    log_sum = tl.load(p_log_sum + query_row * queries + o_m, mask=m_m, other=0.0) * LOG2E
    delta = tl.load(p_delta + query_row * queries + o_m, mask=m_m, other=0.0)
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dstate = tl.zeros([BLOCK_M], tl.float32)
    dwindow = tl.zeros([BLOCK_M], tl.float32)
    slots = tl.where(start < stop, slots, 0)
    o_snapshot = (tl.load(p_blocks + 4) - first_snapshot).to(tl.int64) * rows + i_row
    p_read_keys += o_snapshot * snapshot_slots * D
    p_read_values += o_snapshot * snapshot_slots * D
    tempered = temperature(p_state_temperature, head, TEMPERED)
    for i_n in range(0, slots, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_k = load_rows(p_read_keys, o_n, o_n < slots, D, D, BLOCK_D)
        b_v = load_rows(p_read_values, o_n, o_n < slots, D, D, BLOCK_D)
        visible = m_m[:, None] & (o_n < slots)[None, :]
        b_dq, dstate = query_tile(
            b_dq, dstate, b_q, b_do, log_sum, delta, b_k, b_v, visible, scale, tempered, PRECISION
        )
    o_head = o_head * tokens + head * D
    tempered = temperature(p_window_temperature, head, TEMPERED)
    shift = tokens - queries
    i_key = tl.where(start < stop, i_key, stop + shift)
    for i_n in range(i_key, stop + shift, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_k = load_rows(p_k + o_head, o_n, o_n < stop + shift, heads * D, D, BLOCK_D)
        b_v = load_rows(p_v + o_head, o_n, o_n < stop + shift, heads * D, D, BLOCK_D)
        visible = m_m[:, None] & (o_n[None, :] <= (o_m + shift)[:, None])
        b_dq, dwindow = query_tile(
            b_dq, dwindow, b_q, b_do, log_sum, delta, b_k, b_v, visible, scale, tempered, PRECISION
        )
    store_rows(p_dq + o_query, o_m, m_m, b_dq * scale, heads * GROUP * D, D, BLOCK_D)
    p_dtemperatures += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(p_dtemperatures, tl.sum(dstate, 0) * scale)
    tl.store(p_dtemperatures + 1, tl.sum(dwindow, 0) * scale)


@triton.jit
def key_tile(
    b_dk, b_dv, b_k, b_v, b_q, b_do, log_sum, delta, visible, scale, PRECISION: tl.constexpr
):  # fmt: skip
    """Adds what one tile of queries gives to dk and dv; `scale` holds the temperature."""
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
    b_p = tl.where(visible, tl.exp2(b_s * (scale * LOG2E) - log_sum[None, :]), 0.0)
    b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
    b_ds = b_p * (b_dp - delta[None, :]) * scale
    return tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION), b_dv


@triton.jit
def send_keys(
    p_kept, p_weight, p_sent, p_dnorm, b_dread, o_n, m_n, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """From the gradient of the normed keys to that of their sums, and of the norm [2, D]."""
    o_d = tl.arange(0, BLOCK_D)
    standard, inverse = standardise(load_rows(p_kept, o_n, m_n, D, D, BLOCK_D), D, BLOCK_D)
    tl.store(p_dnorm + o_d, tl.sum(b_dread * standard, 0), mask=o_d < D)
    tl.store(p_dnorm + D + o_d, tl.sum(b_dread, 0), mask=o_d < D)
    b_dread = b_dread * load_vector(p_weight, D, BLOCK_D)[None, :]
    store_rows(p_sent, o_n, m_n, standardise_backward(b_dread, standard, inverse, D), D, D, BLOCK_D)


@triton.jit
def send_values(
    p_kept, p_kept_magnitudes, p_sent, p_sent_magnitudes, b_dread, o_n, m_n, RADIUS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """From the gradient of the values as they are read to that of their sums and of the magnitudes."""
    b_sums = load_rows(p_kept, o_n, m_n, D, D, BLOCK_D)
    to_read = read_scale(b_sums, tl.load(p_kept_magnitudes + o_n, mask=m_n, other=1.0), RADIUS)
    b_dsums = b_dread * to_read[:, None]
    along = tl.zeros_like(to_read)
    if RADIUS:
        norm = tl.sqrt(tl.sum(b_sums * b_sums, 1))
        along = tl.sum(b_dread * b_sums, 1) / tl.maximum(norm, SMALLEST_NORM)
        turn = tl.where(norm < SMALLEST_NORM, 0.0, to_read * along / tl.maximum(norm, SMALLEST_NORM))
        b_dsums -= b_sums * turn[:, None]
    tl.store(p_sent_magnitudes + o_n, along, mask=m_n)
    store_rows(p_sent, o_n, m_n, b_dsums, D, D, BLOCK_D)


@kernel
def read_backward_slots_kernel(
    p_q, p_read_keys, p_read_values, p_kept_keys, p_kept_values, p_kept_magnitudes, p_weight,
    p_state_temperature, p_do, p_log_sum, p_delta, p_sent_keys, p_sent_values, p_sent_magnitudes, p_dnorm,
    p_blocks, first_snapshot, snapshot_slots, row0, heads, queries, scale, TEMPERED: tl.constexpr,
    RADIUS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each block sends to S_K, S_V and the magnitudes it read [snapshots, rows, snapshot_slots, .].

    Of what was read, and of the sums that it was made of; over the queries of all heads that read a slot.
    Norm gradients [programs, 2, D]; grid (slot tiles, rows, blocks).
    """
    i_row, rows = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    row = row0 + i_row
    batch, head = split_row(row, heads)
    p_blocks += 5 * tl.program_id(2)
    start, stop, slots = tl.load(p_blocks), tl.load(p_blocks + 1), tl.load(p_blocks + 3)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < slots
    o_slots = ((tl.load(p_blocks + 4) - first_snapshot).to(tl.int64) * rows + i_row) * snapshot_slots
    b_k = load_rows(p_read_keys + o_slots * D, o_n, m_n, D, D, BLOCK_D)
    b_v = load_rows(p_read_values + o_slots * D, o_n, m_n, D, D, BLOCK_D)
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    scale *= temperature(p_state_temperature, head, TEMPERED)
    for i_g in range(GROUP):
        o_query = (batch * queries * heads * GROUP + head * GROUP + i_g) * D
        o_row = (row * GROUP + i_g) * queries
        for i_m in range(start, tl.where(tl.program_id(0) * BLOCK_N < slots, stop, start), BLOCK_M):
            o_m = i_m + tl.arange(0, BLOCK_M)
            m_m = o_m < stop
            b_q = load_rows(p_q + o_query, o_m, m_m, heads * GROUP * D, D, BLOCK_D)
            b_do = load_rows(p_do + o_query, o_m, m_m, heads * GROUP * D, D, BLOCK_D)
            log_sum = tl.load(p_log_sum + o_row + o_m, mask=m_m, other=0.0) * LOG2E
            delta = tl.load(p_delta + o_row + o_m, mask=m_m, other=0.0)
            visible = m_n[:, None] & m_m[None, :]
            b_dk, b_dv = key_tile(b_dk, b_dv, b_k, b_v, b_q, b_do, log_sum, delta, visible, scale, PRECISION)
    tl.debug_barrier()  # not before the loop, over which the sums would not fit into registers
    # Nor would the masks fit into the scalar ones of AMD.
    m_n = o_n < tl.load(p_blocks + 3, volatile=True)
    i_program = (tl.program_id(2).to(tl.int64) * rows + i_row) * tl.num_programs(0) + tl.program_id(0)
    p_dnorm += i_program * 2 * D
    send_keys(
        p_kept_keys + o_slots * D, p_weight, p_sent_keys + o_slots * D, p_dnorm, b_dk, o_n, m_n, D, BLOCK_D
    )
    tl.debug_barrier()
    m_n = o_n < tl.load(p_blocks + 3, volatile=True)
    send_values(
        p_kept_values + o_slots * D, p_kept_magnitudes + o_slots, p_sent_values + o_slots * D,
        p_sent_magnitudes + o_slots, b_dv, o_n, m_n, RADIUS, D, BLOCK_D,
    )  # fmt: skip


@kernel
def read_backward_window_kernel(
    p_q, p_k, p_v, p_window_temperature, p_do, p_log_sum, p_delta, p_dk, p_dv, position, first_chunk, begin,
    end, heads, queries, tokens, scale, TEMPERED: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr,
    WINDOW_CHUNKS: tl.constexpr, AGAIN: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds to dk, dv [B, t, H, D] of keys [begin, end) what queries send through the window, last first.

    `position` is that of the first query; tiles are aligned to chunks of the whole sequence, wherever a call
    begins, from `first_chunk` on; grid (chunks * tiles, B * H). Of a tile of queries all heads follow each
    other, so that a cut between tiles changes no order. AGAIN loads the keys for every tile of queries.
    """
    KEY_TILES: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = (C + BLOCK_M - 1) // BLOCK_M
    row = tl.program_id(1).to(tl.int64)
    batch, head = split_row(row, heads)
    chunk = first_chunk + tl.program_id(0) // KEY_TILES
    in_chunk = (tl.program_id(0) % KEY_TILES) * BLOCK_N
    shift = tokens - queries
    o_in_chunk = in_chunk + tl.arange(0, BLOCK_N)
    o_n = chunk * C + o_in_chunk - position + shift  # place among the keys
    m_n = (o_in_chunk < C) & (o_n >= begin) & (o_n < end)
    o_head = batch * heads * D
    o_key = o_head * tokens + head * D
    b_k = load_rows(p_k + o_key, o_n, m_n, heads * D, D, BLOCK_D)
    b_v = load_rows(p_v + o_key, o_n, m_n, heads * D, D, BLOCK_D)
    scale *= temperature(p_window_temperature, head, TEMPERED)
    b_dk = load_rows(p_dk + o_key, o_n, m_n, heads * D, D, BLOCK_D)
    b_dv = load_rows(p_dv + o_key, o_n, m_n, heads * D, D, BLOCK_D)
    for i in range((WINDOW_CHUNKS * TILES - in_chunk // BLOCK_M) * GROUP):
        tile = WINDOW_CHUNKS * TILES - 1 - i // GROUP
        o_query = o_head * GROUP * queries + (head * GROUP + i % GROUP) * D
        o_row = (row * GROUP + i % GROUP) * queries
        o_query_in_chunk = (tile % TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
        o_m = (chunk + tile // TILES) * C + o_query_in_chunk - position
        m_m = (o_query_in_chunk < C) & (o_m >= 0) & (o_m < queries)
        b_q = load_rows(p_q + o_query, o_m, m_m, heads * GROUP * D, D, BLOCK_D)
        b_do = load_rows(p_do + o_query, o_m, m_m, heads * GROUP * D, D, BLOCK_D)
        log_sum = tl.load(p_log_sum + o_row + o_m, mask=m_m, other=0.0) * LOG2E
        delta = tl.load(p_delta + o_row + o_m, mask=m_m, other=0.0)
        visible = m_n[:, None] & m_m[None, :] & (o_n[:, None] <= (o_m + shift)[None, :])
        if AGAIN:
            b_k = load_rows(p_k + o_key, o_n, m_n, heads * D, D, BLOCK_D, AGAIN)
            b_v = load_rows(p_v + o_key, o_n, m_n, heads * D, D, BLOCK_D, AGAIN)
        b_dk, b_dv = key_tile(b_dk, b_dv, b_k, b_v, b_q, b_do, log_sum, delta, visible, scale, PRECISION)
    store_rows(p_dk + o_key, o_n, m_n, b_dk, heads * D, D, BLOCK_D)
    store_rows(p_dv + o_key, o_n, m_n, b_dv, heads * D, D, BLOCK_D)
