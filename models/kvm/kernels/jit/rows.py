"""What every kernel does to tiles of rows: load them, norm them, and find the tokens of a slot.

Letters as in fla: p_ pointer, b_ tile in registers, o_ offsets, m_ mask, i_ index. Tensors are contiguous;
a "row" of the grid is one head of one batch entry, and widths are padded to BLOCK_D by masks.
"""

import inspect

import triton
import triton.language as tl

NORM_EPSILON = tl.constexpr(1e-5)
SMALLEST_NORM = tl.constexpr(1e-12)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def kernel(function):
    """A kernel that compiles once per set of constants and dtypes, whatever its numbers are.

    Triton would build another one for numbers that are 1 or multiples of 16, each at its first meeting, in
    the middle of training. What tells how memory is aligned is the width, a constant.
    """
    names = [name for name in inspect.signature(function).parameters if not name.startswith("p_")]
    return triton.jit(do_not_specialize=[name for name in names if name.islower()])(function)


@triton.jit
def split_row(row, heads):
    """Batch entry and head of a row of the grid; divided in 32 bits, since a 64-bit division is a call."""
    row = row.to(tl.int32)
    return (row // heads).to(tl.int64), (row % heads).to(tl.int64)


@triton.jit
def load_rows(
    p_rows, o_rows, m_rows, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, AGAIN: tl.constexpr = False
):
    """[N, BLOCK_D] rows `o_rows` of a tensor whose rows lie `stride` elements apart; 0 where masked.

    AGAIN: where they are asked for, also in a loop that does not change them.
    """
    o_d = tl.arange(0, BLOCK_D)
    pointers = p_rows + o_rows[:, None].to(tl.int64) * stride + o_d[None, :]
    return tl.load(pointers, mask=m_rows[:, None] & (o_d < D)[None, :], other=0.0, volatile=AGAIN)


@triton.jit
def store_rows(p_rows, o_rows, m_rows, b_rows, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    o_d = tl.arange(0, BLOCK_D)
    pointers = p_rows + o_rows[:, None].to(tl.int64) * stride + o_d[None, :]
    tl.store(pointers, b_rows.to(p_rows.dtype.element_ty), mask=m_rows[:, None] & (o_d < D)[None, :])


@triton.jit
def load_vector(p_vector, D: tl.constexpr, BLOCK_D: tl.constexpr):
    o_d = tl.arange(0, BLOCK_D)
    return tl.load(p_vector + o_d, mask=o_d < D, other=0.0)


@triton.jit
def standardise(b_rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of mean 0 and variance 1, and their inverse deviations [N]."""
    m_d = tl.arange(0, BLOCK_D) < D
    mean = tl.sum(b_rows, 1) / D
    centred = tl.where(m_d[None, :], b_rows - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / D + NORM_EPSILON)
    return centred * inverse[:, None], inverse


@triton.jit
def layer_norm(b_rows, p_weight, p_bias, D: tl.constexpr, BLOCK_D: tl.constexpr):
    standard, _ = standardise(b_rows, D, BLOCK_D)
    weight, bias = load_vector(p_weight, D, BLOCK_D), load_vector(p_bias, D, BLOCK_D)
    return standard * weight[None, :] + bias[None, :]


@triton.jit
def standardise_backward(b_grad, standard, inverse, D: tl.constexpr):
    """Gradient of the rows, given that of the standardised rows (0 in padded columns)."""
    along = tl.sum(b_grad * standard, 1) / D
    mean = tl.sum(b_grad, 1) / D
    return (b_grad - mean[:, None] - standard * along[:, None]) * inverse[:, None]


@triton.jit
def read_scale(b_sums, b_magnitudes, RADIUS: tl.constexpr):
    """[N] what S_V is multiplied by to be read: rho / ||S_V||, or 1 / count."""
    if RADIUS:
        return b_magnitudes / tl.maximum(tl.sqrt(tl.sum(b_sums * b_sums, 1)), SMALLEST_NORM)
    return 1.0 / tl.maximum(b_magnitudes, 1.0)


@triton.jit
def lower_bound(p_codes, o_slots, C: tl.constexpr, STEPS: tl.constexpr):
    """[N] how many of the C sorted codes (2 * slot + opens) belong to slots before `o_slots`."""
    count = o_slots * 0
    for i in tl.static_range(STEPS):
        trial = count + (1 << (STEPS - 1 - i))
        inside = trial <= C
        code = tl.load(p_codes + tl.minimum(trial, C) - 1)
        count = tl.where(inside & ((code >> 1) < o_slots), trial, count)
    return count


@triton.jit
def token_weight(p_gate, o_gate, m, opens, first, GATE: tl.constexpr, SWITCHES: tl.constexpr):
    """[N] what multiplies a token in its slot's sums, and whether that is the gate.

    SWITCHES: 1 where appends are gated, 2 where the first state is.
    """
    gated = m & (opens < 0)
    weight = tl.where(m, 1.0, 0.0)
    if GATE:
        gate_opens: tl.constexpr = SWITCHES % 2 == 1
        gate_first: tl.constexpr = SWITCHES >= 2
        gated = m & tl.where(first != 0, gate_first, (opens == 0) | gate_opens)
        weight = tl.where(gated, tl.load(p_gate + o_gate, mask=m, other=1.0).to(tl.float32), weight)
    return weight, gated
