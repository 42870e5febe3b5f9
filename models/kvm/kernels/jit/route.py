"""Routing of one fold: the serial part. A code is 2 * slot + (1 where the token opens that slot).

Slots are shared out to programs; whoever reads what they found joins it. A maximum is the same however slots
are shared, to the last bit.
"""

import triton
import triton.language as tl

from models.kvm.kernels.jit.rows import kernel, layer_norm, load_rows, split_row

NO_CODE = tl.constexpr(0x7FFFFFF0)  # of tokens that a short fold lacks: sorts last
JOINED = tl.constexpr(4)  # shares that are loaded at once


@triton.jit
def better(b_s, o_n, best, chosen):
    """The largest score of each token so far and where it is, the first of equals."""
    highest = tl.max(b_s, 1)
    where = tl.min(tl.where(b_s == highest[:, None], o_n[None, :], 0x7FFFFFF), 1)
    return tl.maximum(best, highest), tl.where(highest > best, where, chosen)


@kernel
def route_kernel(
    p_kbar, p_normed, p_best, p_found, p_scores, kbar_stride, share, slots, all_slots, sinks,
    APPENDS: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The most similar slot that is no sink, for C tokens; with APPENDS also how similar any slot is.

    kbar: rows `kbar_stride` elements apart, normed slots [rows, all_slots, D]; writes [shares, rows, C];
    grid (tiles, rows, shares), a share being `share` slots.
    """
    i_row = tl.program_id(1).to(tl.int64)
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_q = load_rows(p_kbar + i_row * kbar_stride, o_m, o_m < C, D, D, BLOCK_D)
    p_normed += i_row * all_slots * D
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    score = tl.full([BLOCK_M], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK_M], tl.int32) + sinks
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, slots)
    for i_n in range(begin, end, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_n = load_rows(p_normed, o_n, o_n < end, D, D, BLOCK_D)
        b_s = tl.dot(b_q, tl.trans(b_n), input_precision=PRECISION)
        b_s = tl.where((o_n < end)[None, :], b_s, float("-inf"))
        if APPENDS:
            score = tl.maximum(score, tl.max(b_s, 1))
        best, chosen = better(tl.where((o_n >= sinks)[None, :], b_s, float("-inf")), o_n, best, chosen)
    o_found = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + i_row) * C
    tl.store(p_best + o_found + o_m, best, mask=o_m < C)
    tl.store(p_found + o_found + o_m, chosen * 2, mask=o_m < C)
    if APPENDS:
        tl.store(p_scores + o_found + o_m, score, mask=o_m < C)


@triton.jit
def joined_routes(p_best, p_found, stride, shares, o_c, m_c):
    """[N] of each token the best of all shares, the first of equals: how similar, and its code."""
    best = tl.full(o_c.shape, float("-inf"), tl.float32)
    code = tl.load(p_found + o_c, mask=m_c, other=0)
    for i in range(0, shares, JOINED):
        o_share = i + tl.arange(0, JOINED)
        m = (o_share < shares)[:, None] & m_c[None, :]
        o = o_share[:, None].to(tl.int64) * stride + o_c[None, :]
        b_s = tl.load(p_best + o, mask=m, other=float("-inf"))
        b_code = tl.load(p_found + o, mask=m, other=0x7FFFFFFF)
        highest = tl.max(b_s, 0)
        first = tl.min(tl.where(b_s == highest[None, :], b_code, 0x7FFFFFFF), 0)
        code = tl.where(highest > best, first, code)
        best = tl.maximum(best, highest)
    return best, code


@triton.jit
def joined_scores(p_scores, stride, shares, o_c, m_c):
    """[N] how similar any slot is to each token; inf where masked."""
    score = tl.where(m_c, float("-inf"), float("inf"))
    for i in range(0, shares, JOINED):
        o_share = i + tl.arange(0, JOINED)
        m = (o_share < shares)[:, None] & m_c[None, :]
        o = o_share[:, None].to(tl.int64) * stride + o_c[None, :]
        score = tl.maximum(score, tl.max(tl.load(p_scores + o, mask=m, other=float("-inf")), 0))
    return score


@triton.jit
def places_of_openers(b_s, o_c, appended, C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr):
    """[C] place among the `appended` tokens of lowest score, in token order, or -1; of equals the first."""
    rank = tl.zeros([BLOCK_C], tl.int32)
    in_blocks = tl.reshape(b_s, [BLOCK_C // BLOCK, BLOCK])
    o_block = tl.arange(0, BLOCK_C // BLOCK)
    for i in range(BLOCK_C // BLOCK):
        o_i = i * BLOCK + tl.arange(0, BLOCK)
        b_i = tl.sum(tl.where((o_block == i)[:, None], in_blocks, 0.0), 0)
        earlier = (b_i[None, :] == b_s[:, None]) & (o_i[None, :] < o_c[:, None])
        lower = (b_i[None, :] < b_s[:, None]) | earlier
        rank += tl.sum((lower & (o_i < C)[None, :]).to(tl.int32), 1)
    opens = (rank < appended) & (o_c < C)
    place = tl.cumsum(opens.to(tl.int32), 0) - 1
    # Scores that are not numbers have no rank.
    return tl.where(opens & (place < appended), place, -1)


@kernel
def append_kernel(
    p_kbar, p_gate, p_folds, p_weight, p_bias, p_best, p_found, p_scores, kbar_stride, fold, shares, slots,
    appended, heads, tokens, GATED: tl.constexpr, RANKED: tl.constexpr, C: tl.constexpr,
    BLOCK_C: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The `appended` tokens of lowest score open slots from `slots` on; the others are compared with these.

    Writes the final codes in the place of the first share; grid (tiles, rows). All programs of a row find
    the same openers, RANKED tokens at a time: handing them on would take another launch.
    """
    i_row, rows = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    batch, head = split_row(i_row, heads)
    p_kbar += i_row * kbar_stride
    o_c = tl.arange(0, BLOCK_C)
    score = joined_scores(p_scores + i_row * C, rows * C, shares, o_c, o_c < C)
    place = places_of_openers(score, o_c, appended, C, BLOCK_C, RANKED)
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_q = load_rows(p_kbar, o_m, o_m < C, D, D, BLOCK_D)
    best, code = joined_routes(p_best + i_row * C, p_found + i_row * C, rows * C, shares, o_m, o_m < C)
    chosen = code // 2
    for i_n in range(0, appended, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        m_n = o_n < appended
        opener = tl.sum(tl.where(place[None, :] == o_n[:, None], o_c[None, :], 0), 1)
        b_n = load_rows(p_kbar, opener, m_n, D, D, BLOCK_D)
        if GATED:
            o_token = batch * tokens + tl.load(p_folds + 3 * fold) + opener
            gate = tl.load(p_gate + o_token * heads + head, mask=m_n, other=0.0).to(tl.float32)
            b_n *= gate[:, None]
        b_s = tl.dot(b_q, tl.trans(layer_norm(b_n, p_weight, p_bias, D, BLOCK_D)), input_precision=PRECISION)
        best, chosen = better(tl.where(m_n[None, :], b_s, float("-inf")), slots + o_n, best, chosen)
    opened = tl.gather(place, tl.minimum(o_m, BLOCK_C - 1), 0)
    code = tl.where(opened >= 0, (slots + opened) * 2 + 1, chosen * 2)
    tl.store(p_found + i_row * C + o_m, code, mask=o_m < C)


@kernel
def sort_kernel(
    p_codes, p_order, p_sorted, p_folds, folds, C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr
):
    """Tokens of every fold by slot, those of one slot in token order, by counting; grid (folds, rows)."""
    o_row = (tl.program_id(1).to(tl.int64) * folds + tl.program_id(0)) * C
    count = tl.load(p_folds + 3 * tl.program_id(0) + 1)
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
