# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined"
"""The Triton kernel of `ts_core.optim.device_update`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adamw_kernel(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    master_ptr,
    count,
    decay,
    grad_scale,
    lerp_factor,
    beta2,
    one_minus_beta2,
    correction2,
    eps,
    step_size,
    HAS_MASTER: tl.constexpr,
    LERP_FROM_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One rounding per operation and fused multiply-adds only where written: the host's bits."""
    decay = tl.full([BLOCK], decay, tl.float32)
    grad_scale = tl.full([BLOCK], grad_scale, tl.float32)
    lerp_factor = tl.full([BLOCK], lerp_factor, tl.float32)
    beta2 = tl.full([BLOCK], beta2, tl.float32)
    one_minus_beta2 = tl.full([BLOCK], one_minus_beta2, tl.float32)
    correction2 = tl.full([BLOCK], correction2, tl.float32)
    eps = tl.full([BLOCK], eps, tl.float32)
    step_size = tl.full([BLOCK], step_size, tl.float32)
    blocks = tl.cdiv(count, BLOCK)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < count
        g = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * grad_scale
        m = tl.load(exp_avg_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(exp_avg_sq_ptr + offsets, mask=mask, other=0.0)
        if HAS_MASTER:
            p = tl.load(master_ptr + offsets, mask=mask, other=0.0)
        else:
            p = tl.load(param_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        p = p * decay
        delta = g - m
        if LERP_FROM_M:
            m = tl.fma(delta, lerp_factor, m)
        else:
            m = tl.fma(delta, lerp_factor, g)
        v = tl.fma(g * one_minus_beta2, g, v * beta2)
        root = tl.sqrt_rn(v)
        denominator = tl.div_rn(root, correction2) + eps
        p = p - tl.div_rn(m * step_size, denominator)
        tl.store(exp_avg_ptr + offsets, m, mask=mask)
        tl.store(exp_avg_sq_ptr + offsets, v, mask=mask)
        if HAS_MASTER:
            tl.store(master_ptr + offsets, p, mask=mask)
        tl.store(param_ptr + offsets, p.to(param_ptr.dtype.element_ty), mask=mask)
