# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Rotary position embedding of queries and keys in one launch, in Triton.

A pair (a, b) of a head's first ROTARY channels, with the tables' values at both places:

    forward:  a' = a cos_a - b sin_a          b' = b cos_b + a sin_b
    backward: da = da' cos_a + db' sin_b      db = db' cos_b - da' sin_a

The pair is channels (i, i + ROTARY / 2), or (2 i, 2 i + 1) if interleaved. Su et al., "RoFormer",
2021. Channels from ROTARY on are copied. All arithmetic is fp32; results are rounded once.

Shapes: q, k [batch, heads, tokens, head size], any strides but 1 for the last; cos, sin
[batch or 1, tokens, ROTARY] with unit last stride.
"""

import triton
import triton.language as tl


@triton.jit
def rotate_pairs(a, b, cos_a, cos_b, sin_a, sin_b, BACKWARD: tl.constexpr):
    """(a', b'), or their gradients. Which product an FMA leaves unrounded is written out: else the
    compiler chooses, and each launch plan is compiled anew."""
    if BACKWARD:
        out_a = tl.fma(a, cos_a, b * sin_b)
        out_b = tl.fma(b, cos_b, -a * sin_a)
    else:
        out_a = tl.fma(a, cos_a, -b * sin_a)
        out_b = tl.fma(b, cos_b, a * sin_b)
    return out_a, out_b


@triton.jit
def _load_pairs(
    rows,
    row_ok,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """(a, b) [ROWS, PAIRS] in fp32 of the rows [ROWS] of pointers; neighbours are read together."""
    if INTERLEAVED:
        col = tl.arange(0, 2 * PAIRS)
        ok = row_ok[:, None] & (col < ROTARY)[None, :]
        both = tl.load(rows[:, None] + col[None, :], mask=ok, other=0.0).to(tl.float32)
        return tl.split(tl.reshape(both, [ROWS, PAIRS, 2]))
    else:
        col = tl.arange(0, PAIRS)
        ok = row_ok[:, None] & (col < ROTARY // 2)[None, :]
        a = tl.load(rows[:, None] + col[None, :], mask=ok, other=0.0)
        b = tl.load(rows[:, None] + col[None, :] + ROTARY // 2, mask=ok, other=0.0)
        return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store_pairs(
    rows,
    row_ok,
    a,
    b,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    if INTERLEAVED:
        col = tl.arange(0, 2 * PAIRS)
        ok = row_ok[:, None] & (col < ROTARY)[None, :]
        both = tl.reshape(tl.join(a, b), [ROWS, 2 * PAIRS])
        tl.store(rows[:, None] + col[None, :], both.to(rows.dtype.element_ty), mask=ok)
    else:
        col = tl.arange(0, PAIRS)
        ok = row_ok[:, None] & (col < ROTARY // 2)[None, :]
        target = rows[:, None] + col[None, :]
        tl.store(target, a.to(rows.dtype.element_ty), mask=ok)
        tl.store(target + ROTARY // 2, b.to(rows.dtype.element_ty), mask=ok)


@triton.jit
def _rotate_heads(
    in_ptr,
    out_ptr,
    in_s0,
    in_s1,
    in_s2,
    out_s0,
    out_s1,
    out_s2,
    batch,
    token,
    first_head,
    heads,
    cos_a,
    cos_b,
    sin_a,
    sin_b,
    ROTARY: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TAIL: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
):
    head = (first_head + tl.arange(0, HEADS)).to(tl.int64)
    head_ok = head < heads
    source = in_ptr + batch * in_s0 + token * in_s2 + head * in_s1
    target = out_ptr + batch * out_s0 + token * out_s2 + head * out_s1
    a, b = _load_pairs(source, head_ok, HEADS, PAIRS, ROTARY, INTERLEAVED)
    out_a, out_b = rotate_pairs(a, b, cos_a, cos_b, sin_a, sin_b, BACKWARD)
    _store_pairs(target, head_ok, out_a, out_b, HEADS, PAIRS, ROTARY, INTERLEAVED)
    if TAIL > 0:
        col = ROTARY + tl.arange(0, TAIL)
        tail_ok = head_ok[:, None] & (col < HEAD_SIZE)[None, :]
        rest = tl.load(source[:, None] + col[None, :], mask=tail_ok, other=0.0)
        tl.store(target[:, None] + col[None, :], rest, mask=tail_ok)


@triton.jit
def rotary_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    q_s0,
    q_s1,
    q_s2,
    k_s0,
    k_s1,
    k_s2,
    qo_s0,
    qo_s1,
    qo_s2,
    ko_s0,
    ko_s1,
    ko_s2,
    cos_s0,
    cos_s1,
    sin_s0,
    sin_s1,
    tokens,
    q_heads,
    k_heads,
    ROTARY: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TAIL: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Program (position, group): HEADS heads of q, or of k in the groups after q's.

    TAIL: a power of two of at least HEAD_SIZE - ROTARY, 0 for none; PAIRS likewise for ROTARY / 2.
    """
    position = tl.program_id(0).to(tl.int64)
    batch = position // tokens
    token = position % tokens
    group = tl.program_id(1)
    one = tl.arange(0, 1)
    cos_row = cos_ptr + batch * cos_s0 + token * cos_s1 + one
    sin_row = sin_ptr + batch * sin_s0 + token * sin_s1 + one
    cos_a, cos_b = _load_pairs(cos_row, one == 0, 1, PAIRS, ROTARY, INTERLEAVED)
    sin_a, sin_b = _load_pairs(sin_row, one == 0, 1, PAIRS, ROTARY, INTERLEAVED)
    q_groups = tl.cdiv(q_heads, HEADS)
    if group < q_groups:
        _rotate_heads(
            q_ptr,
            q_out_ptr,
            q_s0,
            q_s1,
            q_s2,
            qo_s0,
            qo_s1,
            qo_s2,
            batch,
            token,
            group * HEADS,
            q_heads,
            cos_a,
            cos_b,
            sin_a,
            sin_b,
            ROTARY,
            HEAD_SIZE,
            TAIL,
            PAIRS,
            INTERLEAVED,
            BACKWARD,
            HEADS,
        )
    else:
        _rotate_heads(
            k_ptr,
            k_out_ptr,
            k_s0,
            k_s1,
            k_s2,
            ko_s0,
            ko_s1,
            ko_s2,
            batch,
            token,
            (group - q_groups) * HEADS,
            k_heads,
            cos_a,
            cos_b,
            sin_a,
            sin_b,
            ROTARY,
            HEAD_SIZE,
            TAIL,
            PAIRS,
            INTERLEAVED,
            BACKWARD,
            HEADS,
        )
