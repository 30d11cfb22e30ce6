"""RMSNorm on tensors: the Triton kernels where they run, the same formula in PyTorch elsewhere."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ts_kernels._backend import on_device_of, use_triton
from ts_kernels._rms_norm_plan import backward_plan, forward_plan, mean_factor

# The kernels hold whole rows in registers; wider rows take the PyTorch path.
_WIDEST = 32768


class Form(NamedTuple):
    """Which formula: `offset` is added to the weight, `round_first` rounds before the weight."""

    eps: float
    offset: float = 0.0
    round_first: bool = True

    def result_dtype(self, x: Tensor, weight: Tensor) -> torch.dtype:
        return torch.promote_types(x.dtype, weight.dtype) if self.round_first else x.dtype


class Normed(NamedTuple):
    """y [..., D]; rstd [...]; the sum x + residual, or x itself without a residual."""

    y: Tensor
    rstd: Tensor
    summed: Tensor


def stat_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def empty_forward(x: Tensor, weight: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """(y, rstd) without values."""
    return (
        x.new_empty(x.shape, dtype=form.result_dtype(x, weight)),
        x.new_empty(x.shape[:-1], dtype=stat_dtype(x)),
    )


def empty_backward(
    x: Tensor, weight: Tensor, want_x: bool, want_weight: bool
) -> tuple[Tensor, Tensor]:
    """(dx, dw) without values; a size of 0 if not wanted."""
    return (
        x.new_empty(x.shape if want_x else 0),
        weight.new_empty(weight.shape if want_weight else 0),
    )


def forward(x: Tensor, residual: Tensor | None, weight: Tensor, form: Form) -> Normed:
    """The norm of x, or of x + residual."""
    tensors = (x, weight) if residual is None else (x, weight, residual)
    if x.numel() and x.shape[-1] <= _WIDEST and use_triton(*tensors):
        return _launch_forward(x, residual, weight, form)
    summed = x if residual is None else (x + residual).contiguous()
    h = summed.to(stat_dtype(x))
    rstd = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + form.eps)
    h = h * rstd
    if form.round_first:
        h = h.to(x.dtype)
    y = (_shifted(weight, form, h.dtype) * h).to(form.result_dtype(x, weight))
    return Normed(y.contiguous(), rstd.squeeze(-1).contiguous(), summed)


def backward(
    dy: Tensor,
    dsum: Tensor | None,
    summed: Tensor,
    weight: Tensor,
    rstd: Tensor,
    form: Form,
    want_x: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    """(dx, dw); a size of 0 if not wanted. `dsum` is added to dx before its one rounding."""
    x = summed
    tensors = (x, weight, dy) if dsum is None else (x, weight, dy, dsum)
    if x.numel() and x.shape[-1] <= _WIDEST and use_triton(*tensors) and (want_x or want_weight):
        return _launch_backward(dy, dsum, x, weight, rstd, form, want_x, want_weight)
    dx, dw = x.new_empty(0), weight.new_empty(0)
    rstd = rstd.unsqueeze(-1)
    xhat = x.to(rstd.dtype) * rstd
    wide_dy = dy.to(rstd.dtype)
    if want_x:
        wdy = wide_dy * _shifted(weight.to(rstd.dtype), form, rstd.dtype)
        mean = (wdy * xhat).mean(-1, keepdim=True)
        wide_dx = (wdy - xhat * mean) * rstd
        if dsum is not None:
            wide_dx = wide_dx + dsum
        dx = wide_dx.to(x.dtype).contiguous()
    if want_weight:
        rounded = xhat.to(x.dtype).to(rstd.dtype) if form.round_first else xhat
        dw = (wide_dy * rounded).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    return dx, dw


def _shifted(weight: Tensor, form: Form, dtype: torch.dtype) -> Tensor:
    """weight + offset, the sum in at least fp32."""
    if not form.offset:
        return weight
    return weight.to(torch.promote_types(dtype, torch.float32)) + form.offset


def _as_rows(x: Tensor) -> Tensor:
    """[..., D] -> [rows, D] with unit column stride, copied only if it must be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _launch_forward(x: Tensor, residual: Tensor | None, weight: Tensor, form: Form) -> Normed:
    from ts_kernels.triton_kernels.rms_norm import rms_norm_forward_kernel

    y, rstd = empty_forward(x, weight, form)
    x2 = _as_rows(x)
    residual2 = x2 if residual is None else _as_rows(residual)
    summed = x if residual is None else x.new_empty(x.shape)
    rows, hidden = x2.shape
    plain_16_bit = residual is None and x.itemsize == weight.itemsize == 2
    plan = forward_plan(rows, hidden, plain_16_bit, form.round_first)
    width, height, vectorized = plan.reduction
    with on_device_of(x):
        rms_norm_forward_kernel[(-(-rows // plan.rows_per_program),)](
            x2,
            residual2,
            weight.contiguous(),
            y,
            summed,  # not written without a residual
            rstd,
            x2.stride(0),
            residual2.stride(0),
            rows,
            mean_factor(rows, hidden),
            float(form.eps),
            HIDDEN=hidden,
            OFFSET=float(form.offset),
            ROUND_FIRST=form.round_first,
            HAS_RESIDUAL=residual is not None,
            ROWS=plan.rows_per_program,
            STEPS=plan.steps,
            MORE_STEPS=plan.more_steps,
            WIDTH=width,
            HEIGHT=height,
            VECTORIZED=vectorized,
            LOG_WIDTH=width.bit_length() - 1,
            LOG_HEIGHT=height.bit_length() - 1,
            EARLY_WEIGHT=plan.early_weight,
            num_warps=plan.num_warps,
            enable_fp_fusion=False,
        )
    return Normed(y, rstd, summed)


def _compared(tensors: tuple[Tensor, ...], form: Form) -> bool:
    """Whether these are like those for which reading ahead into registers gave the same bits.

    Another layout or dtype may make the compiler fuse other products with their sums.
    """
    return (form.offset, form.round_first) == (0.0, True) and all(
        t.dtype == torch.bfloat16 and t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors
    )


def _launch_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    form: Form,
    want_x: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    from ts_kernels.triton_kernels.rms_norm_backward import (
        rms_norm_backward_kernel,
        sum_parts_kernel,
    )

    x2, dy2 = _as_rows(x), _as_rows(dy)
    dsum2 = dy2 if dsum is None else _as_rows(dsum)
    rows, hidden = x2.shape
    row_bytes = x2.itemsize + dy2.itemsize + (0 if dsum is None else dsum2.itemsize)
    registers = dsum is not None and want_x and _compared((x2, dy2, dsum2, weight), form)
    plan = backward_plan(rows, hidden, want_weight, row_bytes, registers)
    dx, dw = empty_backward(x, weight, want_x, want_weight)
    parts = rstd  # not written without a weight gradient
    if want_weight:
        parts = torch.empty((plan.programs, hidden), dtype=torch.float32, device=x.device)
    with on_device_of(x):
        rms_norm_backward_kernel[(plan.programs,)](
            dy2,
            dsum2,
            x2,
            weight.contiguous(),
            rstd,
            dx,
            parts,
            dy2.stride(0),
            dsum2.stride(0),
            x2.stride(0),
            rows,
            plan.tiles_per_program,
            HIDDEN=hidden,
            OFFSET=float(form.offset),
            ROUND_FIRST=form.round_first,
            HAS_DSUM=dsum is not None,
            ROWS=plan.rows_per_tile,
            BLOCK=plan.block,
            MORE=plan.more,
            WANT_X=want_x,
            WANT_WEIGHT=want_weight,
            STAGES=plan.stages,
            AHEAD=plan.ahead,
            LANES=plan.lanes,
            num_warps=plan.num_warps,
        )
        if want_weight:
            columns = 16
            sum_parts_kernel[(-(-hidden // columns),)](
                parts,
                dw,
                plan.programs,
                HIDDEN=hidden,
                ROWS=64,
                COLUMNS=columns,
                UNROLL=plan.unroll,
                num_warps=4,
            )
    return dx, dw
