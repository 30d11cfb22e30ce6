# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""RMSNorm in Triton, forward.

    rstd = rsqrt(mean(x^2) + eps)
    y    = w * round(x * rstd)                         round: to the dtype of x (ROUND_FIRST)

with w = weight + OFFSET. Without ROUND_FIRST nothing is rounded before y is stored. With a residual
x is round(x + residual), which is stored too.

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

Shapes: x, y [rows, HIDDEN] with unit column stride; weight [HIDDEN]; rstd [rows] fp32.
Whole rows are held in registers, in two blocks of columns so that a size such as 5120 is 4096 and
1024 rather than 8192 padded; the second may be absent (0).
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
def _add_steps(acc, tile, ROWS: tl.constexpr, STEPS: tl.constexpr, SPAN: tl.constexpr):
    """acc [ROWS, SPAN] + the steps of tile [ROWS, STEPS, SPAN], one after the other.

    Halves the tile until one step is left: a reduction would choose its own order.
    """
    if STEPS == 1:
        return acc + tl.reshape(tile, [ROWS, SPAN])
    else:
        HALF: tl.constexpr = STEPS // 2
        halves = tl.permute(tl.reshape(tile, [ROWS, 2, HALF, SPAN]), (0, 2, 3, 1))
        first, second = tl.split(halves)
        acc = _add_steps(acc, first, ROWS, HALF, SPAN)
        return _add_steps(acc, second, ROWS, HALF, SPAN)


@triton.jit
def _add_lanes(
    acc,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
    LOG_WIDTH: tl.constexpr,
    LOG_HEIGHT: tl.constexpr,
):
    """[ROWS, HEIGHT * WIDTH * 4] -> [ROWS], as a WIDTH x HEIGHT block of torch's reduction does.

    A thread's four accumulators are added in turn, then the threads across the width, then across
    the height, halving each time.
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


@triton.jit
def _load_steps(x_ptr, row, row_ok, x_stride, col, HIDDEN: tl.constexpr):
    """x of the rows at columns col [STEPS, SPAN]; 0 outside."""
    ok = row_ok[:, None, None] & (col < HIDDEN)[None, :, :]
    return tl.load(x_ptr + row[:, None, None] * x_stride + col[None, :, :], mask=ok, other=0.0)


@triton.jit
def _add_residual(x, residual_ptr, sum_ptr, row, row_ok, stride, col, HIDDEN: tl.constexpr):
    """round(x + residual) at columns col [STEPS, SPAN], which is also written to sum."""
    residual = _load_steps(residual_ptr, row, row_ok, stride, col, HIDDEN)
    x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    ok = row_ok[:, None, None] & (col < HIDDEN)[None, :, :]
    tl.store(sum_ptr + row[:, None, None] * HIDDEN + col[None, :, :], x, mask=ok)
    return x


@triton.jit
def _load_weight(weight_ptr, col, HIDDEN: tl.constexpr):
    return tl.load(weight_ptr + col, mask=col < HIDDEN, other=0.0)


@triton.jit
def _store_steps(
    x,
    rstd,
    weight,
    y_ptr,
    row,
    row_ok,
    col,
    HIDDEN: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    """Writes w * round(x * rstd) of the rows at columns col [STEPS, SPAN]."""
    weight = weight.to(tl.float32)
    if OFFSET != 0:
        weight += OFFSET
    xhat = x.to(tl.float32) * rstd[:, None, None]
    if ROUND_FIRST:
        xhat = xhat.to(x.dtype).to(tl.float32)
    y = (weight[None, :, :] * xhat).to(y_ptr.dtype.element_ty)
    ok = row_ok[:, None, None] & (col < HIDDEN)[None, :, :]
    tl.store(y_ptr + row[:, None, None] * HIDDEN + col[None, :, :], y, mask=ok)


@triton.jit(do_not_specialize=["rows", "mean_factor", "eps"])
def rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    rows,
    mean_factor,
    eps,
    HIDDEN: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    MORE_STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    VECTORIZED: tl.constexpr,
    LOG_WIDTH: tl.constexpr,
    LOG_HEIGHT: tl.constexpr,
    EARLY_WEIGHT: tl.constexpr,
):
    """ROWS rows per program; squares are added in the order of torch's CUDA reduction.

    There a row is read by WIDTH x HEIGHT threads, SPAN = WIDTH * HEIGHT * 4 values at a step.
    (STEPS + MORE_STEPS) * SPAN >= HIDDEN; zeros beyond HIDDEN change no sum.

    Launch with enable_fp_fusion=False: a fused multiply-add would round once where torch's
    separate kernels round twice. EARLY_WEIGHT: the weight is read before the sum, whose barriers
    nothing is moved across.
    """
    SPAN: tl.constexpr = WIDTH * HEIGHT * 4
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_ok = row < rows
    col = tl.arange(0, STEPS)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    x = _load_steps(x_ptr, row, row_ok, x_stride, col, HIDDEN)
    if MORE_STEPS > 0:
        more_col = tl.arange(0, MORE_STEPS)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        more_col += STEPS * SPAN
        more_x = _load_steps(x_ptr, row, row_ok, x_stride, more_col, HIDDEN)
    if EARLY_WEIGHT:
        weight = _load_weight(weight_ptr, col, HIDDEN)
        if MORE_STEPS > 0:
            more_weight = _load_weight(weight_ptr, more_col, HIDDEN)
    if HAS_RESIDUAL:
        x = _add_residual(x, residual_ptr, sum_ptr, row, row_ok, residual_stride, col, HIDDEN)
        if MORE_STEPS > 0:
            more_x = _add_residual(
                more_x, residual_ptr, sum_ptr, row, row_ok, residual_stride, more_col, HIDDEN
            )

    h = x.to(tl.float32)
    acc = _add_steps(tl.zeros([ROWS, SPAN], tl.float32), h * h, ROWS, STEPS, SPAN)
    if MORE_STEPS > 0:
        more_h = more_x.to(tl.float32)
        acc = _add_steps(acc, more_h * more_h, ROWS, MORE_STEPS, SPAN)
    total = _add_lanes(acc, ROWS, WIDTH, HEIGHT, VECTORIZED, LOG_WIDTH, LOG_HEIGHT)
    variance = total * tl.full([], mean_factor, tl.float32)
    rstd = tl.rsqrt(variance + tl.full([], eps, tl.float32))
    tl.store(rstd_ptr + row, rstd, mask=row_ok)

    if not EARLY_WEIGHT:
        weight = _load_weight(weight_ptr, col, HIDDEN)
    _store_steps(x, rstd, weight, y_ptr, row, row_ok, col, HIDDEN, OFFSET, ROUND_FIRST)
    if MORE_STEPS > 0:
        if not EARLY_WEIGHT:
            more_weight = _load_weight(weight_ptr, more_col, HIDDEN)
        _store_steps(
            more_x, rstd, more_weight, y_ptr, row, row_ok, more_col, HIDDEN, OFFSET, ROUND_FIRST
        )
