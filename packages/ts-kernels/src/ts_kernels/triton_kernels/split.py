# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""A float32 matrix as the sum of two bfloat16 matrices, in Triton.

v = scale * (a + b);   high = bf16(v);   low = bf16(v - high)
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["scale"])
def split_kernel(
    in_ptr,
    out_ptr,
    in_stride,
    in_part,
    out_stride,
    out_part,
    elements,
    columns,
    scale,
    HAS_PARTS: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """v [rows, columns] of `in` to three parts of `out`, `out_part` elements apart.

    Part LOW (1 or 2) is the low half, the other two are the high one. HAS_PARTS: a and b lie
    `in_part` elements apart in `in`; otherwise there is no b.

    Launch with enable_fp_fusion=False: scale * (a + b) - high in one fused operation would take the
    low half of a product that was never rounded to float32.
    """
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = index < elements
    row = index // columns
    col = index % columns
    value = tl.load(in_ptr + row * in_stride + col, mask=ok, other=0.0)
    if HAS_PARTS:
        value += tl.load(in_ptr + row * in_stride + col + in_part, mask=ok, other=0.0)
    value *= tl.full([], scale, tl.float32)
    high = value.to(tl.bfloat16)
    low = (value - high.to(tl.float32)).to(tl.bfloat16)
    target = out_ptr + row * out_stride + col
    tl.store(target, high, mask=ok)
    tl.store(target + LOW * out_part, low, mask=ok)
    tl.store(target + (3 - LOW) * out_part, high, mask=ok)
