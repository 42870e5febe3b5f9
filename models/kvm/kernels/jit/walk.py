"""State update without atomics: one program adds the tokens of a slot, in their order."""

import triton
import triton.language as tl

from models.kvm.kernels.jit.route import joined_routes
from models.kvm.kernels.jit.rows import (
    kernel,
    layer_norm,
    load_rows,
    lower_bound,
    read_scale,
    split_row,
    store_rows,
    token_weight,
)


@triton.jit
def run_of(p_codes, o_slots, m_slots, C: tl.constexpr, STEPS: tl.constexpr):
    """[N] where the tokens of each slot begin in the sorted fold, and how many they are."""
    begin = lower_bound(p_codes, o_slots, C, STEPS)
    length = lower_bound(p_codes, o_slots + 1, C, STEPS) - begin
    return begin, tl.where(m_slots, length, 0)


@triton.jit
def token_of_run(p_order, p_codes, begin, length, i):
    """[N] the i-th token of each run, whether it is there, and whether it opens its slot."""
    m = i < length
    token = tl.load(p_order + begin + i, mask=m, other=0)
    opens = tl.load(p_codes + begin + i, mask=m, other=0) & 1
    return token, m, opens


@kernel
def fold_keys_kernel(
    p_sums, p_normed, p_kbar, p_gate, p_best, p_found, p_codes, p_folds, p_weight, p_bias, kbar_stride, fold,
    folds, shares, slots, all_slots, heads, tokens, C: tl.constexpr, BLOCK_C: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, GATE: tl.constexpr, SWITCHES: tl.constexpr,
):  # fmt: skip
    """Adds one fold to S_K [rows, all_slots, D] and renews N_s(S_K) where it changed; grid (tiles, rows).

    Each program finds the tokens of its slots among what routing found; the first also keeps the codes
    [rows, folds, C].
    """
    i_row, rows = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    batch, head = split_row(i_row, heads)
    o_s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start, count = tl.load(p_folds + 3 * fold), tl.load(p_folds + 3 * fold + 1)
    first = tl.load(p_folds + 3 * fold + 2)
    o_c = tl.arange(0, BLOCK_C)
    _best, code = joined_routes(p_best + i_row * C, p_found + i_row * C, rows * C, shares, o_c, o_c < count)
    kept = tl.where(tl.program_id(0) == 0, count, 0)
    tl.store(p_codes + (i_row * folds + fold) * C + o_c, code, mask=o_c < kept)
    mine = (code >> 1)[None, :] == o_s[:, None]
    mine = mine & (o_c < count)[None, :] & (o_s < slots)[:, None]
    in_order = (o_c * 2 + (code & 1))[None, :]
    length = tl.sum(mine.to(tl.int32), 1)
    touched = length > 0
    b_sums = load_rows(p_sums + i_row * all_slots * D, o_s, touched, D, D, BLOCK_D)
    o_gate = (batch * tokens + start) * heads + head
    last = tl.full([BLOCK], -1, tl.int32)
    for i in range(tl.max(length, 0)):
        last = tl.min(tl.where(mine & (in_order > last[:, None]), in_order, 2 * BLOCK_C), 1)
        m = i < length
        token, opens = tl.where(m, last >> 1, 0), last & 1
        weight, _ = token_weight(p_gate + o_gate, token * heads, m, opens, first, GATE, SWITCHES)
        b_sums += weight[:, None] * load_rows(p_kbar + i_row * kbar_stride, token, m, D, D, BLOCK_D)
    store_rows(p_sums + i_row * all_slots * D, o_s, touched, b_sums, D, D, BLOCK_D)
    b_normed = layer_norm(b_sums, p_weight, p_bias, D, BLOCK_D)
    store_rows(p_normed + i_row * all_slots * D, o_s, touched, b_normed, D, D, BLOCK_D)


@triton.jit
def value_of_token(p_v, token, m, weight, gated, first, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Values [N, D] in float32, their lengths [N], and what multiplies these in a radius."""
    b_v = load_rows(p_v, token, m, stride, D, BLOCK_D).to(tl.float32)
    norm = tl.sqrt(tl.sum(b_v * b_v, 1))
    return b_v, norm, tl.where(gated & (first == 0), weight, 1.0)


@kernel
def walk_kernel(
    p_keys, p_values, p_magnitudes, p_kbar, p_v, p_gate, p_order, p_codes, p_folds, p_reads, p_weight, p_bias,
    p_read_keys, p_read_values, p_kept_keys, p_kept_values, p_kept_magnitudes, first_snapshot, snapshots,
    snapshot_slots, all_slots, folds, row0, heads, tokens, C: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, STEPS: tl.constexpr, GATE: tl.constexpr,
    SWITCHES: tl.constexpr, RADIUS: tl.constexpr, SNAPSHOT: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Brings slots [rows, all_slots, .] over folds; snapshot i is the state after i folds of the call.

    SNAPSHOT writes what queries read, N_s(S_K) and the scaled values [snapshots, rows, snapshot_slots, D];
    KEEP the sums themselves; grid (tiles, rows). kbar [rows, folds of this launch, C, D].
    """
    i_row, rows = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    row = row0 + i_row
    batch, head = split_row(row, heads)
    o_s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_s = o_s < all_slots
    b_keys = load_rows(p_keys + i_row * all_slots * D, o_s, m_s, D, D, BLOCK_D)
    b_values = load_rows(p_values + i_row * all_slots * D, o_s, m_s, D, D, BLOCK_D)
    b_magnitudes = tl.load(p_magnitudes + i_row * all_slots + o_s, mask=m_s, other=0.0)
    first_fold = tl.maximum(first_snapshot, 1) - 1
    local_folds = first_snapshot + snapshots - 1 - first_fold
    for i in range(snapshots):
        snapshot = first_snapshot + i
        fold = tl.maximum(snapshot, 1) - 1
        o_fold = (row * folds + fold) * C
        begin, length = run_of(p_codes + o_fold, o_s, m_s & (snapshot > 0), C, STEPS)
        start, first = tl.load(p_folds + 3 * fold), tl.load(p_folds + 3 * fold + 2)
        o_start = (batch * tokens + start) * heads + head
        o_kbar = (i_row * local_folds + fold - first_fold) * C * D
        for j in range(tl.max(length, 0)):
            token, m, opens = token_of_run(p_order + o_fold, p_codes + o_fold, begin, length, j)
            weight, gated = token_weight(p_gate + o_start, token * heads, m, opens, first, GATE, SWITCHES)
            b_keys += weight[:, None] * load_rows(p_kbar + o_kbar, token, m, D, D, BLOCK_D)
            b_v, norm, lengthened = value_of_token(
                p_v + o_start * D, token, m, weight, gated, first, heads * D, D, BLOCK_D
            )
            b_values += weight[:, None] * b_v
            magnitude = tl.where(opens != 0, norm * tl.abs(lengthened), 0.0) if RADIUS else 1.0
            b_magnitudes += tl.where(m, magnitude, 0.0)
        m_read = o_s < tl.load(p_reads + snapshot)
        o_snapshot = (rows.to(tl.int64) * i + i_row) * snapshot_slots
        if SNAPSHOT:
            b_read = layer_norm(b_keys, p_weight, p_bias, D, BLOCK_D)
            store_rows(p_read_keys + o_snapshot * D, o_s, m_read, b_read, D, D, BLOCK_D)
            b_read = b_values * read_scale(b_values, b_magnitudes, RADIUS)[:, None]
            store_rows(p_read_values + o_snapshot * D, o_s, m_read, b_read, D, D, BLOCK_D)
        if KEEP:
            store_rows(p_kept_keys + o_snapshot * D, o_s, m_read, b_keys, D, D, BLOCK_D)
            store_rows(p_kept_values + o_snapshot * D, o_s, m_read, b_values, D, D, BLOCK_D)
            tl.store(p_kept_magnitudes + o_snapshot + o_s, b_magnitudes, mask=m_read)
    store_rows(p_keys + i_row * all_slots * D, o_s, m_s, b_keys, D, D, BLOCK_D)
    store_rows(p_values + i_row * all_slots * D, o_s, m_s, b_values, D, D, BLOCK_D)
    tl.store(p_magnitudes + i_row * all_slots + o_s, b_magnitudes, mask=m_s)


@kernel
def share_out_kernel(
    p_dkeys, p_dvalues, p_dmagnitudes, p_sent_keys, p_sent_values, p_sent_magnitudes, p_reads, p_folds,
    p_kbar, p_v, p_gate, p_order, p_codes, p_dkbar, p_dv, p_dgate, first_snapshot, snapshots,
    snapshot_slots, all_slots, folds, row0, heads, tokens, C: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, STEPS: tl.constexpr, GATE: tl.constexpr,
    SWITCHES: tl.constexpr, RADIUS: tl.constexpr,
):  # fmt: skip
    """The walk backwards: adds what reads sent to the running gradient, then hands tokens their share.

    Adds to dv [B, t, H, D], writes dgate [B, t, H] and dkbar, laid out as kbar; grid (tiles, rows).
    """
    i_row, rows = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    row = row0 + i_row
    batch, head = split_row(row, heads)
    o_s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_s = o_s < all_slots
    b_dkeys = load_rows(p_dkeys + i_row * all_slots * D, o_s, m_s, D, D, BLOCK_D)
    b_dvalues = load_rows(p_dvalues + i_row * all_slots * D, o_s, m_s, D, D, BLOCK_D)
    b_dmagnitudes = tl.load(p_dmagnitudes + i_row * all_slots + o_s, mask=m_s, other=0.0)
    first_fold = tl.maximum(first_snapshot, 1) - 1
    local_folds = first_snapshot + snapshots - 1 - first_fold
    for i in range(snapshots):
        at = snapshots - 1 - i
        snapshot = first_snapshot + at
        m_read = o_s < tl.load(p_reads + snapshot)
        o_snapshot = (rows.to(tl.int64) * at + i_row) * snapshot_slots
        b_dkeys += load_rows(p_sent_keys + o_snapshot * D, o_s, m_read, D, D, BLOCK_D)
        b_dvalues += load_rows(p_sent_values + o_snapshot * D, o_s, m_read, D, D, BLOCK_D)
        b_dmagnitudes += tl.load(p_sent_magnitudes + o_snapshot + o_s, mask=m_read, other=0.0)
        fold = tl.maximum(snapshot, 1) - 1
        o_fold = (row * folds + fold) * C
        begin, length = run_of(p_codes + o_fold, o_s, m_s & (snapshot > 0), C, STEPS)
        start, first = tl.load(p_folds + 3 * fold), tl.load(p_folds + 3 * fold + 2)
        o_start = (batch * tokens + start) * heads + head
        o_kbar = (i_row * local_folds + fold - first_fold) * C * D
        for j in range(tl.max(length, 0)):
            token, m, opens = token_of_run(p_order + o_fold, p_codes + o_fold, begin, length, j)
            weight, gated = token_weight(p_gate + o_start, token * heads, m, opens, first, GATE, SWITCHES)
            store_rows(p_dkbar + o_kbar, token, m, weight[:, None] * b_dkeys, D, D, BLOCK_D)
            b_share = weight[:, None] * b_dvalues
            b_v, norm, lengthened = value_of_token(
                p_v + o_start * D, token, m, weight, gated, first, heads * D, D, BLOCK_D
            )
            opened = m & (opens != 0) & (norm > 0.0)
            share = tl.where(opened, b_dmagnitudes, 0.0)
            if RADIUS:
                b_share += b_v * (share * tl.abs(lengthened) / tl.where(opened, norm, 1.0))[:, None]
            b_dv = load_rows(p_dv + o_start * D, token, m, heads * D, D, BLOCK_D)
            store_rows(p_dv + o_start * D, token, m, b_dv + b_share, heads * D, D, BLOCK_D)
            if GATE:
                b_kbar = load_rows(p_kbar + o_kbar, token, m, D, D, BLOCK_D)
                dgate = tl.sum(b_kbar * b_dkeys, 1) + tl.sum(b_v * b_dvalues, 1)
                if RADIUS:
                    turn = tl.where(lengthened < 0.0, -1.0, 1.0)
                    dgate += tl.where(first == 0, share * norm * turn, 0.0)
                tl.store(p_dgate + o_start + token * heads, tl.where(gated, dgate, 0.0), mask=m)
    store_rows(p_dkeys + i_row * all_slots * D, o_s, m_s, b_dkeys, D, D, BLOCK_D)
    store_rows(p_dvalues + i_row * all_slots * D, o_s, m_s, b_dvalues, D, D, BLOCK_D)
    tl.store(p_dmagnitudes + i_row * all_slots + o_s, b_dmagnitudes, mask=m_s)
