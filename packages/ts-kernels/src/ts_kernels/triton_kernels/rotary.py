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
    col_a,
    col_b,
    pair_ok,
    ROTARY: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TAIL: tl.constexpr,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
):
    head = (first_head + tl.arange(0, HEADS)).to(tl.int64)
    head_ok = head < heads
    source = in_ptr + batch * in_s0 + token * in_s2
    source += (head * in_s1)[:, None]
    target = out_ptr + batch * out_s0 + token * out_s2
    target += (head * out_s1)[:, None]
    ok = head_ok[:, None] & pair_ok[None, :]
    a = tl.load(source + col_a[None, :], mask=ok, other=0.0).to(tl.float32)
    b = tl.load(source + col_b[None, :], mask=ok, other=0.0).to(tl.float32)
    if BACKWARD:
        out_a = a * cos_a[None, :] + b * sin_b[None, :]
        out_b = b * cos_b[None, :] - a * sin_a[None, :]
    else:
        out_a = a * cos_a[None, :] - b * sin_a[None, :]
        out_b = b * cos_b[None, :] + a * sin_b[None, :]
    tl.store(target + col_a[None, :], out_a.to(out_ptr.dtype.element_ty), mask=ok)
    tl.store(target + col_b[None, :], out_b.to(out_ptr.dtype.element_ty), mask=ok)
    if TAIL > 0:
        col = ROTARY + tl.arange(0, TAIL)
        tail_ok = head_ok[:, None] & (col < HEAD_SIZE)[None, :]
        rest = tl.load(source + col[None, :], mask=tail_ok, other=0.0)
        tl.store(target + col[None, :], rest, mask=tail_ok)


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
    pair = tl.arange(0, PAIRS)
    pair_ok = pair < ROTARY // 2
    if INTERLEAVED:
        col_a = 2 * pair
        col_b = 2 * pair + 1
    else:
        col_a = pair
        col_b = pair + ROTARY // 2
    cos_row = cos_ptr + batch * cos_s0 + token * cos_s1
    sin_row = sin_ptr + batch * sin_s0 + token * sin_s1
    cos_a = tl.load(cos_row + col_a, mask=pair_ok, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_row + col_b, mask=pair_ok, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_row + col_a, mask=pair_ok, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_row + col_b, mask=pair_ok, other=0.0).to(tl.float32)
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
            col_a,
            col_b,
            pair_ok,
            ROTARY,
            HEAD_SIZE,
            TAIL,
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
            col_a,
            col_b,
            pair_ok,
            ROTARY,
            HEAD_SIZE,
            TAIL,
            BACKWARD,
            HEADS,
        )
