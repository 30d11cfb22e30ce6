# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""The rotary kernel with one program per token: the same arithmetic as rotary.py.

The tables are read and addresses computed once for all heads of a token rather than once for a
group of them; the loads of all groups are issued before the first is used.
"""

import triton
import triton.language as tl

from ts_kernels.triton_kernels.rotary import rotate_pairs


@triton.jit
def _load(
    rows,
    row_ok,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FULL: tl.constexpr,
):
    """The pairs of the rows [ROWS] of pointers, as they lie in memory: see _as_pairs.

    FULL: all rows exist, and ROTARY is 2 * PAIRS.
    """
    WIDTH: tl.constexpr = 2 * PAIRS if INTERLEAVED else PAIRS
    END: tl.constexpr = ROTARY if INTERLEAVED else ROTARY // 2
    col = tl.arange(0, WIDTH)
    source = rows[:, None] + col[None, :]
    ok = row_ok[:, None] & (col < END)[None, :]
    if FULL:
        first = tl.load(source)
    else:
        first = tl.load(source, mask=ok, other=0.0)
    if INTERLEAVED:
        return first, first
    elif FULL:
        return first, tl.load(source + ROTARY // 2)
    else:
        return first, tl.load(source + ROTARY // 2, mask=ok, other=0.0)


@triton.jit
def _as_pairs(first, second, ROWS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(a, b) [ROWS, PAIRS] in fp32."""
    if INTERLEAVED:
        return tl.split(tl.reshape(first.to(tl.float32), [ROWS, PAIRS, 2]))
    else:
        return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store(
    rows,
    row_ok,
    a,
    b,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FULL: tl.constexpr,
):
    WIDTH: tl.constexpr = 2 * PAIRS if INTERLEAVED else PAIRS
    END: tl.constexpr = ROTARY if INTERLEAVED else ROTARY // 2
    col = tl.arange(0, WIDTH)
    target = rows[:, None] + col[None, :]
    ok = row_ok[:, None] & (col < END)[None, :]
    if INTERLEAVED:
        both = tl.reshape(tl.join(a, b), [ROWS, WIDTH]).to(rows.dtype.element_ty)
        if FULL:
            tl.store(target, both)
        else:
            tl.store(target, both, mask=ok)
    else:
        first, second = a.to(rows.dtype.element_ty), b.to(rows.dtype.element_ty)
        if FULL:
            tl.store(target, first)
            tl.store(target + ROTARY // 2, second)
        else:
            tl.store(target, first, mask=ok)
            tl.store(target + ROTARY // 2, second, mask=ok)


@triton.jit
def _rotate_groups(
    source,
    target,
    head,
    heads,
    in_step,
    out_step,
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
    GROUPS: tl.constexpr,
    FULL: tl.constexpr,
):
    """GROUPS groups of heads, `in_step` and `out_step` apart: loads, the other groups, the rest."""
    head_ok = head < heads
    first, second = _load(source, head_ok, HEADS, PAIRS, ROTARY, INTERLEAVED, FULL)
    if TAIL > 0:
        col = ROTARY + tl.arange(0, TAIL)
        tail_ok = head_ok[:, None] & (col < HEAD_SIZE)[None, :]
        rest = tl.load(source[:, None] + col[None, :], mask=tail_ok, other=0.0)
    if GROUPS > 1:
        _rotate_groups(
            source + in_step,
            target + out_step,
            head + HEADS,
            heads,
            in_step,
            out_step,
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
            GROUPS - 1,
            FULL,
        )
    a, b = _as_pairs(first, second, HEADS, PAIRS, INTERLEAVED)
    out_a, out_b = rotate_pairs(a, b, cos_a, cos_b, sin_a, sin_b, BACKWARD)
    _store(target, head_ok, out_a, out_b, HEADS, PAIRS, ROTARY, INTERLEAVED, FULL)
    if TAIL > 0:
        tl.store(target[:, None] + col[None, :], rest, mask=tail_ok)


@triton.jit
def rotary_tokens_kernel(
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
    Q_GROUPS: tl.constexpr,
    K_GROUPS: tl.constexpr,
    FULL: tl.constexpr,
):
    """Program (position): all heads of one token, HEADS at a time.

    Q_GROUPS * HEADS >= q_heads, K_GROUPS likewise. FULL: nowhere more, and ROTARY is 2 * PAIRS.
    TAIL and PAIRS as in rotary.py.
    """
    position = tl.program_id(0)
    batch = (position // tokens).to(tl.int64)
    token = (position % tokens).to(tl.int64)
    head = tl.arange(0, HEADS)
    # a copy for each head of a group, so that each thread reads what it uses
    cos_row = cos_ptr + batch * cos_s0 + token * cos_s1 + head * 0
    sin_row = sin_ptr + batch * sin_s0 + token * sin_s1 + head * 0
    c_first, c_second = _load(cos_row, head < HEADS, HEADS, PAIRS, ROTARY, INTERLEAVED, FULL)
    s_first, s_second = _load(sin_row, head < HEADS, HEADS, PAIRS, ROTARY, INTERLEAVED, FULL)
    cos_a, cos_b = _as_pairs(c_first, c_second, HEADS, PAIRS, INTERLEAVED)
    sin_a, sin_b = _as_pairs(s_first, s_second, HEADS, PAIRS, INTERLEAVED)
    wide = head.to(tl.int64)
    step = tl.full([], HEADS, tl.int64)
    if Q_GROUPS > 0:
        _rotate_groups(
            q_ptr + batch * q_s0 + token * q_s2 + wide * q_s1,
            q_out_ptr + batch * qo_s0 + token * qo_s2 + wide * qo_s1,
            head,
            q_heads,
            step * q_s1,
            step * qo_s1,
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
            Q_GROUPS,
            FULL,
        )
    if K_GROUPS > 0:
        _rotate_groups(
            k_ptr + batch * k_s0 + token * k_s2 + wide * k_s1,
            k_out_ptr + batch * ko_s0 + token * ko_s2 + wide * ko_s1,
            head,
            k_heads,
            step * k_s1,
            step * ko_s1,
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
            K_GROUPS,
            FULL,
        )
