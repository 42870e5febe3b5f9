"""Routing of one fold: the serial part. A code is 2 * slot + (1 where the token opens that slot)."""

import triton
import triton.language as tl

from models.kvm.kernels.jit.rows import layer_norm, load_rows, split_row

NO_CODE = tl.constexpr(0x7FFFFFF0)  # of tokens that a short fold lacks: sorts last


@triton.jit
def better(b_s, o_n, best, chosen):
    """The largest score of each token so far and where it is, the first of equals."""
    highest = tl.max(b_s, 1)
    where = tl.min(tl.where(b_s == highest[:, None], o_n[None, :], 0x7FFFFFF), 1)
    return tl.maximum(best, highest), tl.where(highest > best, where, chosen)


@triton.jit
def route_kernel(
    p_kbar, p_normed, p_codes, p_best, p_scores, kbar_stride, fold, folds, slots, all_slots, sinks,
    APPENDS: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The most similar slot that is no sink, for C tokens; with APPENDS also how similar any slot is.

    kbar: rows `kbar_stride` elements apart, normed slots [rows, all_slots, D]; grid (tiles, rows).
    """
    i_row = tl.program_id(1).to(tl.int64)
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_q = load_rows(p_kbar + i_row * kbar_stride, o_m, o_m < C, D, D, BLOCK_D)
    p_normed += i_row * all_slots * D
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    score = tl.full([BLOCK_M], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK_M], tl.int32) + sinks
    for i_n in range(0, slots, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_n = load_rows(p_normed, o_n, o_n < slots, D, D, BLOCK_D)
        b_s = tl.dot(b_q, tl.trans(b_n), input_precision=PRECISION)
        b_s = tl.where((o_n < slots)[None, :], b_s, float("-inf"))
        if APPENDS:
            score = tl.maximum(score, tl.max(b_s, 1))
        best, chosen = better(tl.where((o_n >= sinks)[None, :], b_s, float("-inf")), o_n, best, chosen)
    if APPENDS:
        tl.store(p_best + i_row * C + o_m, best, mask=o_m < C)
        tl.store(p_scores + i_row * C + o_m, score, mask=o_m < C)
    tl.store(p_codes + (i_row * folds + fold) * C + o_m, chosen * 2, mask=o_m < C)


@triton.jit
def append_kernel(
    p_scores, p_opened, p_openers, slots, appended,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The `appended` tokens of lowest score, ties the earliest, open slots from `slots` on, in token order.

    Writes for every token the slot it opens or -1, and for every new slot its token; grid (rows,).
    """
    i_row = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BLOCK_C)
    b_s = tl.load(p_scores + i_row * C + o_c, mask=o_c < C, other=float("inf"))
    rank = tl.zeros([BLOCK_C], tl.int32)
    for i in range(0, C, BLOCK):
        o_i = i + tl.arange(0, BLOCK)
        b_i = tl.load(p_scores + i_row * C + o_i, mask=o_i < C, other=float("inf"))
        lower = (b_i[None, :] < b_s[:, None]) | (
            (b_i[None, :] == b_s[:, None]) & (o_i[None, :] < o_c[:, None])
        )
        rank += tl.sum((lower & (o_i < C)[None, :]).to(tl.int32), 1)
    opens = (rank < appended) & (o_c < C)
    place = tl.cumsum(opens.to(tl.int32), 0) - 1
    opens = opens & (place < appended)  # scores that are not numbers have no rank
    tl.store(p_opened + i_row * C + o_c, tl.where(opens, slots + place, -1), mask=o_c < C)
    tl.store(p_openers + i_row * C + place, o_c, mask=opens)


@triton.jit
def route_new_kernel(
    p_kbar, p_gate, p_folds, p_weight, p_bias, p_codes, p_best, p_opened, p_openers, kbar_stride, fold, folds,
    slots, appended, heads, tokens, GATED: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Finishes a fold that appends: compares with the new slots only, and lets their tokens open them."""
    i_row = tl.program_id(1).to(tl.int64)
    batch, head = split_row(i_row, heads)
    p_kbar += i_row * kbar_stride
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_q = load_rows(p_kbar, o_m, o_m < C, D, D, BLOCK_D)
    best = tl.load(p_best + i_row * C + o_m, mask=o_m < C, other=0.0)
    p_codes += (i_row * folds + fold) * C
    chosen = tl.load(p_codes + o_m, mask=o_m < C, other=0) // 2
    for i_n in range(0, appended, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        m_n = o_n < appended
        opener = tl.load(p_openers + i_row * C + o_n, mask=m_n, other=0)
        b_n = load_rows(p_kbar, opener, m_n, D, D, BLOCK_D)
        if GATED:
            o_token = batch * tokens + tl.load(p_folds + 3 * fold) + opener
            gate = tl.load(p_gate + o_token * heads + head, mask=m_n, other=0.0).to(tl.float32)
            b_n *= gate[:, None]
        b_s = tl.dot(b_q, tl.trans(layer_norm(b_n, p_weight, p_bias, D, BLOCK_D)), input_precision=PRECISION)
        best, chosen = better(tl.where(m_n[None, :], b_s, float("-inf")), slots + o_n, best, chosen)
    opened = tl.load(p_opened + i_row * C + o_m, mask=o_m < C, other=-1)
    tl.store(p_codes + o_m, tl.where(opened >= 0, opened * 2 + 1, chosen * 2), mask=o_m < C)


@triton.jit
def sort_kernel(
    p_codes, p_order, p_sorted, p_folds, fold, folds,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tokens of one fold by slot, those of one slot in token order, by counting; grid (rows,)."""
    o_row = (tl.program_id(0).to(tl.int64) * folds + fold) * C
    count = tl.load(p_folds + 3 * fold + 1)
    o_c = tl.arange(0, BLOCK_C)
    code = tl.load(p_codes + o_row + o_c, mask=o_c < count, other=NO_CODE)
    place = tl.zeros([BLOCK_C], tl.int32)
    for i in range(0, C, BLOCK):
        o_i = i + tl.arange(0, BLOCK)
        other = tl.load(p_codes + o_row + o_i, mask=o_i < count, other=NO_CODE)
        slot, mine = (other >> 1)[None, :], (code >> 1)[:, None]
        before = (slot < mine) | ((slot == mine) & (o_i[None, :] < o_c[:, None]))
        place += tl.sum((before & (o_i < C)[None, :]).to(tl.int32), 1)
    tl.store(p_order + o_row + place, o_c, mask=o_c < C)
    tl.store(p_sorted + o_row + place, code, mask=o_c < C)
