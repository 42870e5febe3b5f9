"""Key preparation: kbar = N_s([0_r ; k[r:]]), the key under which a token enters the state."""

import triton
import triton.language as tl

from models.kvm.kernels.jit.rows import (
    kernel,
    layer_norm,
    load_rows,
    load_vector,
    split_row,
    standardise,
    standardise_backward,
    store_rows,
)


@triton.jit
def load_masked_keys(
    p_k, o_tokens, m_tokens, stride, ROTARY: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Keys in float32, rotary dims zeroed."""
    b_k = load_rows(p_k, o_tokens, m_tokens, stride, D, BLOCK_D).to(tl.float32)
    return tl.where((tl.arange(0, BLOCK_D) >= ROTARY)[None, :], b_k, 0.0)


@kernel
def prepare_keys_kernel(
    p_k, p_kbar, p_weight, p_bias, p_folds, first_fold, folds, row0, heads, tokens,
    C: tl.constexpr, ROTARY: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """k [B, t, H, D] to kbar [rows, folds, C, D], folds from `first_fold` on; grid (folds * tiles, rows)."""
    TILES: tl.constexpr = (C + BLOCK - 1) // BLOCK
    i_fold, i_row = tl.program_id(0) // TILES, tl.program_id(1)
    start = tl.load(p_folds + 3 * (first_fold + i_fold))
    count = tl.load(p_folds + 3 * (first_fold + i_fold) + 1)
    o_in_fold = (tl.program_id(0) % TILES) * BLOCK + tl.arange(0, BLOCK)
    m = o_in_fold < count
    row = (row0 + i_row).to(tl.int64)
    batch, head = split_row(row, heads)
    p_k += (batch * tokens * heads + head) * D
    b_k = load_masked_keys(p_k, start + o_in_fold, m, heads * D, ROTARY, D, BLOCK_D)
    b_kbar = layer_norm(b_k, p_weight, p_bias, D, BLOCK_D)
    p_kbar += (i_row.to(tl.int64) * folds + i_fold) * C * D
    store_rows(p_kbar, o_in_fold, o_in_fold < C, tl.where(m[:, None], b_kbar, 0.0), D, D, BLOCK_D)


@kernel
def prepare_keys_backward_kernel(
    p_k, p_dkbar, p_weight, p_folds, p_dk, p_dnorm, first_fold, folds, row0, heads, tokens,
    C: tl.constexpr, ROTARY: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds to dk [B, t, H, D] and writes the norm's gradients [programs, 2, D]; the grid of the forward."""
    TILES: tl.constexpr = (C + BLOCK - 1) // BLOCK
    i_fold, i_row = tl.program_id(0) // TILES, tl.program_id(1)
    start = tl.load(p_folds + 3 * (first_fold + i_fold))
    count = tl.load(p_folds + 3 * (first_fold + i_fold) + 1)
    o_in_fold = (tl.program_id(0) % TILES) * BLOCK + tl.arange(0, BLOCK)
    m = o_in_fold < count
    row = (row0 + i_row).to(tl.int64)
    batch, head = split_row(row, heads)
    o_row = (batch * tokens * heads + head) * D
    b_k = load_masked_keys(p_k + o_row, start + o_in_fold, m, heads * D, ROTARY, D, BLOCK_D)
    standard, inverse = standardise(b_k, D, BLOCK_D)
    p_dkbar += (i_row.to(tl.int64) * folds + i_fold) * C * D
    b_dkbar = load_rows(p_dkbar, o_in_fold, m, D, D, BLOCK_D)
    o_d = tl.arange(0, BLOCK_D)
    p_dnorm += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + i_row) * 2 * D
    tl.store(p_dnorm + o_d, tl.sum(b_dkbar * standard, 0), mask=o_d < D)
    tl.store(p_dnorm + D + o_d, tl.sum(b_dkbar, 0), mask=o_d < D)
    b_grad = b_dkbar * load_vector(p_weight, D, BLOCK_D)[None, :]
    b_grad = standardise_backward(b_grad, standard, inverse, D)
    b_grad = tl.where((o_d >= ROTARY)[None, :], b_grad, 0.0)
    b_dk = load_rows(p_dk + o_row, start + o_in_fold, m, heads * D, D, BLOCK_D)
    store_rows(p_dk + o_row, start + o_in_fold, m, b_dk + b_grad, heads * D, D, BLOCK_D)


@kernel
def norm_slots_kernel(
    p_sums, p_normed, p_weight, p_bias, slots, all_slots,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """N_s(S_K) of the first `slots` of [rows, all_slots, D]; grid (tiles, rows)."""
    o_row = tl.program_id(1).to(tl.int64) * all_slots * D
    o_s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_sums = load_rows(p_sums + o_row, o_s, o_s < slots, D, D, BLOCK_D)
    store_rows(
        p_normed + o_row, o_s, o_s < slots, layer_norm(b_sums, p_weight, p_bias, D, BLOCK_D), D, D, BLOCK_D
    )
