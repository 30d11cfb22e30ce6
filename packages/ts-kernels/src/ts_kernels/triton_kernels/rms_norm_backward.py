# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""RMSNorm in Triton, backward.

    dx   = rstd * (wdy - xhat * mean(wdy * xhat))      wdy = w * dy, xhat = x * rstd
    dw   = sum over rows of dy * round(xhat)           round: to the dtype of x (ROUND_FIRST)

with w = weight + OFFSET. Without ROUND_FIRST xhat is not rounded. Where x is a sum, the gradient
that reaches it from elsewhere is added to dx.

Shapes: x, dy, dx [rows, HIDDEN] with unit column stride; weight [HIDDEN]; rstd [rows] fp32. Whole
rows are held in registers, in two blocks of columns as in forward.
"""

import triton
import triton.language as tl


@triton.jit
def _load_block(ptr, row, stride, col, ok):
    return tl.load(ptr + row[:, None] * stride + col[None, :], mask=ok, other=0.0)


@triton.jit
def _store_dx(wdy, xhat, mean, rstd, more_dx, dx_ptr, row, col, ok, HIDDEN: tl.constexpr):
    dx = (wdy - xhat * mean[:, None]) * rstd[:, None] + more_dx
    tl.store(dx_ptr + row[:, None] * HIDDEN + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _load_tile(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    rstd_ptr,
    dy_stride,
    dsum_stride,
    x_stride,
    row,
    end,
    HIDDEN: tl.constexpr,
    HAS_DSUM: tl.constexpr,
    BLOCK: tl.constexpr,
    MORE: tl.constexpr,
):
    """(rstd, x, dy, dsum, and those three at the columns of MORE) of the rows below `end`.

    What there is none of is rstd again.
    """
    row_ok = row < end
    col = tl.arange(0, BLOCK)
    ok = row_ok[:, None] & (col < HIDDEN)[None, :]
    x = _load_block(x_ptr, row, x_stride, col, ok)
    dy = _load_block(dy_ptr, row, dy_stride, col, ok)
    rstd = tl.load(rstd_ptr + row, mask=row_ok, other=0.0)
    if HAS_DSUM:
        dsum = _load_block(dsum_ptr, row, dsum_stride, col, ok)
    else:
        dsum = rstd
    if MORE > 0:
        more_col = BLOCK + tl.arange(0, MORE)
        more_ok = row_ok[:, None] & (more_col < HIDDEN)[None, :]
        more_x = _load_block(x_ptr, row, x_stride, more_col, more_ok)
        more_dy = _load_block(dy_ptr, row, dy_stride, more_col, more_ok)
        if HAS_DSUM:
            more_dsum = _load_block(dsum_ptr, row, dsum_stride, more_col, more_ok)
        else:
            more_dsum = rstd
    else:
        more_x, more_dy, more_dsum = rstd, rstd, rstd
    return rstd, x, dy, dsum, more_x, more_dy, more_dsum


@triton.jit
def _lane_sums(values, ROWS: tl.constexpr, LENGTH: tl.constexpr, LANES: tl.constexpr):
    """[ROWS, LENGTH] -> [ROWS, LANES]: neighbours, at most 8, then the pieces LANES * 8 apart."""
    EACH: tl.constexpr = min(8, LENGTH // LANES)
    parts = tl.sum(tl.reshape(values, [ROWS, LENGTH // (LANES * EACH), LANES, EACH]), axis=3)
    return tl.sum(parts, axis=1)


@triton.jit(do_not_specialize=["rows", "tiles"])
def rms_norm_backward_kernel(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dw_parts_ptr,
    dy_stride,
    dsum_stride,
    x_stride,
    rows,
    tiles,
    HIDDEN: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    HAS_DSUM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MORE: tl.constexpr,
    WANT_X: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    LANES: tl.constexpr,
):
    """Each program walks `tiles` tiles of ROWS whole rows and writes one row of dw_parts.

    The tiles of a program depend on the shape alone, so the weight gradient is summed in the
    same order on every run. BLOCK + MORE >= HIDDEN.

    Later tiles are read ahead: STAGES - 1 of them into shared memory, or AHEAD (0, 1 or 2, with
    one stage) into registers. LANES: 0, or the number of threads, with which the sum over two
    blocks is one reduction over the threads, in another order.
    """
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    col_ok = col < HIDDEN
    weight = tl.load(weight_ptr + col, mask=col_ok, other=0.0).to(tl.float32) + OFFSET
    acc = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    if MORE > 0:
        more_col = BLOCK + tl.arange(0, MORE)
        more_col_ok = more_col < HIDDEN
        more_weight = tl.load(weight_ptr + more_col, mask=more_col_ok, other=0.0).to(tl.float32)
        more_weight += OFFSET
        more_acc = tl.zeros([ROWS, MORE], dtype=tl.float32)
    first = program * tiles * ROWS + tl.arange(0, ROWS)
    end = tl.minimum((program + 1) * tiles * ROWS, rows)
    if AHEAD > 0:
        next_tile = _load_tile(
            dy_ptr,
            dsum_ptr,
            x_ptr,
            rstd_ptr,
            dy_stride,
            dsum_stride,
            x_stride,
            first,
            end,
            HIDDEN,
            HAS_DSUM,
            BLOCK,
            MORE,
        )
    if AHEAD > 1:
        later_tile = _load_tile(
            dy_ptr,
            dsum_ptr,
            x_ptr,
            rstd_ptr,
            dy_stride,
            dsum_stride,
            x_stride,
            first + ROWS,
            end,
            HIDDEN,
            HAS_DSUM,
            BLOCK,
            MORE,
        )
    for tile in tl.range(0, tiles, num_stages=STAGES):
        row = first + tile * ROWS
        row_ok = row < end
        ok = row_ok[:, None] & col_ok[None, :]
        # all loads before the first reduction, whose barrier nothing is moved across
        loaded = _load_tile(
            dy_ptr,
            dsum_ptr,
            x_ptr,
            rstd_ptr,
            dy_stride,
            dsum_stride,
            x_stride,
            row + AHEAD * ROWS,
            end,
            HIDDEN,
            HAS_DSUM,
            BLOCK,
            MORE,
        )
        if AHEAD == 0:
            now = loaded
        elif AHEAD == 1:
            now = next_tile
            next_tile = loaded
        else:
            now = next_tile
            next_tile = later_tile
            later_tile = loaded
        rstd, x, dy, dsum, more_x, more_dy, more_dsum = now
        dy = dy.to(tl.float32)
        dsum = dsum.to(tl.float32) if HAS_DSUM else 0.0
        if MORE > 0:
            more_ok = row_ok[:, None] & more_col_ok[None, :]
            more_dy = more_dy.to(tl.float32)
            more_dsum = more_dsum.to(tl.float32) if HAS_DSUM else 0.0
        xhat = x.to(tl.float32) * rstd[:, None]
        wdy = dy * weight[None, :]
        if MORE > 0:
            more_xhat = more_x.to(tl.float32) * rstd[:, None]
            more_wdy = more_dy * more_weight[None, :]
        if LANES > 0 and MORE > 0:
            sums = _lane_sums(wdy * xhat, ROWS, BLOCK, LANES)
            sums += _lane_sums(more_wdy * more_xhat, ROWS, MORE, LANES)
            total = tl.sum(sums, axis=1)
        else:
            total = tl.sum(wdy * xhat, axis=1)
            if MORE > 0:
                total += tl.sum(more_wdy * more_xhat, axis=1)
        if WANT_X:
            mean = total / HIDDEN
            _store_dx(wdy, xhat, mean, rstd, dsum, dx_ptr, row, col, ok, HIDDEN)
            if MORE > 0:
                _store_dx(
                    more_wdy,
                    more_xhat,
                    mean,
                    rstd,
                    more_dsum,
                    dx_ptr,
                    row,
                    more_col,
                    more_ok,
                    HIDDEN,
                )
        if WANT_WEIGHT:
            if ROUND_FIRST:
                xhat = xhat.to(x.dtype).to(tl.float32)
            acc += dy * xhat
            if MORE > 0:
                if ROUND_FIRST:
                    more_xhat = more_xhat.to(x.dtype).to(tl.float32)
                more_acc += more_dy * more_xhat
    if WANT_WEIGHT:
        parts = dw_parts_ptr + program * HIDDEN
        tl.store(parts + col, tl.sum(acc, axis=0), mask=col_ok)
        if MORE > 0:
            tl.store(parts + more_col, tl.sum(more_acc, axis=0), mask=more_col_ok)


@triton.jit(do_not_specialize=["parts"])
def sum_parts_kernel(
    parts_ptr,
    sum_ptr,
    parts,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """[parts, HIDDEN] fp32 -> [HIDDEN] in sum's dtype, rounded once; COLUMNS per program.

    UNROLL steps of ROWS are read together; they are added in the same order.
    """
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    col_ok = col < HIDDEN
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in tl.range(0, parts, ROWS, loop_unroll_factor=UNROLL):
        row = start + tl.arange(0, ROWS)
        ok = (row < parts)[:, None] & col_ok[None, :]
        acc += tl.load(parts_ptr + row[:, None] * HIDDEN + col[None, :], mask=ok, other=0.0)
    total = tl.sum(acc, axis=0)
    tl.store(sum_ptr + col, total.to(sum_ptr.dtype.element_ty), mask=col_ok)
