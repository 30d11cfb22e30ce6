# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""RMSNorm in Triton.

    rstd = rsqrt(mean(x^2) + eps)
    y    = weight * round(x * rstd)                    round: to the dtype of x
    dx   = rstd * (wdy - xhat * mean(wdy * xhat))      wdy = weight * dy, xhat = x * rstd
    dw   = sum over rows of dy * round(xhat)

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

Shapes: x, y, dy, dx [rows, HIDDEN] with unit column stride; weight [HIDDEN]; rstd [rows] fp32.
"""

import triton
import triton.language as tl


@triton.jit
def _halving_sum(values, GROUPS: tl.constexpr, LENGTH: tl.constexpr, LOG_LENGTH: tl.constexpr):
    """[GROUPS, LENGTH] -> [GROUPS], adding the upper half to the lower half until one is left."""
    for level in tl.static_range(LOG_LENGTH):
        values = tl.sum(tl.reshape(values, [GROUPS, 2, LENGTH >> (level + 1)]), axis=1)
    return tl.reshape(values, [GROUPS])


@triton.jit
def _sum_like_torch(
    acc,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
    LOG_WIDTH: tl.constexpr,
    LOG_HEIGHT: tl.constexpr,
):
    """Adds up `acc` [ROWS, HEIGHT * WIDTH * 4] in the order of torch's CUDA reduction.

    There a row is read by a block of WIDTH x HEIGHT threads with four accumulators each. They
    are added in turn, then across the width, then across the height, halving each time.
    """
    LANES: tl.constexpr = ROWS * HEIGHT * WIDTH
    if VECTORIZED:  # a thread reads four neighbours
        lanes = tl.reshape(acc, [LANES, 2, 2])
    else:  # a thread's four values lie WIDTH apart (HEIGHT is 1)
        turned = tl.permute(tl.reshape(acc, [ROWS, 4, WIDTH]), (0, 2, 1))
        lanes = tl.reshape(turned, [LANES, 2, 2])
    even, odd = tl.split(lanes)
    a0, a2 = tl.split(even)
    a1, a3 = tl.split(odd)
    lane_sums = ((a0 + a1) + a2) + a3
    row_parts = _halving_sum(lane_sums, ROWS * HEIGHT, WIDTH, LOG_WIDTH)
    return _halving_sum(row_parts, ROWS, HEIGHT, LOG_HEIGHT)


@triton.jit(do_not_specialize=["rows", "mean_factor", "eps"])
def rms_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    x_stride,
    rows,
    mean_factor,
    eps,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
    LOG_WIDTH: tl.constexpr,
    LOG_HEIGHT: tl.constexpr,
    STEPS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """ROWS rows per program; two passes over them, the second out of the cache.

    Launch with enable_fp_fusion=False: a fused multiply-add would round once where torch's
    separate kernels round twice.
    """
    SPAN: tl.constexpr = WIDTH * HEIGHT * 4
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_ok = row < rows
    x_rows = x_ptr + row[:, None] * x_stride
    y_rows = y_ptr + row[:, None] * HIDDEN

    acc = tl.zeros([ROWS, SPAN], dtype=tl.float32)
    for step in range(0, STEPS, UNROLL):
        for k in tl.static_range(UNROLL):
            col = (step + k) * SPAN + tl.arange(0, SPAN)
            ok = row_ok[:, None] & (col < HIDDEN)[None, :]
            x = tl.load(x_rows + col[None, :], mask=ok, other=0.0).to(tl.float32)
            acc += x * x
    total = _sum_like_torch(acc, ROWS, WIDTH, HEIGHT, VECTORIZED, LOG_WIDTH, LOG_HEIGHT)
    variance = total * tl.full([], mean_factor, tl.float32)
    rstd = tl.rsqrt(variance + tl.full([], eps, tl.float32))
    tl.store(rstd_ptr + row, rstd, mask=row_ok)

    for step in range(0, STEPS, UNROLL):
        for k in tl.static_range(UNROLL):
            col = (step + k) * SPAN + tl.arange(0, SPAN)
            col_ok = col < HIDDEN
            ok = row_ok[:, None] & col_ok[None, :]
            x = tl.load(x_rows + col[None, :], mask=ok, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + col, mask=col_ok, other=0.0).to(tl.float32)
            xhat = (x * rstd[:, None]).to(x_ptr.dtype.element_ty).to(tl.float32)
            y = (weight[None, :] * xhat).to(y_ptr.dtype.element_ty)
            tl.store(y_rows + col[None, :], y, mask=ok)


@triton.jit(do_not_specialize=["rows", "tiles"])
def rms_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dw_parts_ptr,
    dy_stride,
    x_stride,
    rows,
    tiles,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WANT_X: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
):
    """Each program walks `tiles` tiles of ROWS whole rows and writes one row of dw_parts.

    The tiles of a program depend on the shape alone, so the weight gradient is summed in the
    same order on every run.
    """
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    col_ok = col < HIDDEN
    weight = tl.load(weight_ptr + col, mask=col_ok, other=0.0).to(tl.float32)
    acc = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for tile in range(0, tiles):
        row = (program * tiles + tile) * ROWS + tl.arange(0, ROWS)
        row_ok = row < rows
        ok = row_ok[:, None] & col_ok[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=ok, other=0.0)
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + col[None, :], mask=ok, other=0.0)
        dy = dy.to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row_ok, other=0.0)
        xhat = x.to(tl.float32) * rstd[:, None]
        if WANT_X:
            wdy = dy * weight[None, :]
            mean = tl.sum(wdy * xhat, axis=1) / HIDDEN
            dx = (wdy - xhat * mean[:, None]) * rstd[:, None]
            dx = dx.to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + row[:, None] * HIDDEN + col[None, :], dx, mask=ok)
        if WANT_WEIGHT:
            acc += dy * xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
    if WANT_WEIGHT:
        tl.store(dw_parts_ptr + program * HIDDEN + col, tl.sum(acc, axis=0), mask=col_ok)
