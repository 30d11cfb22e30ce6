"""RMSNorm: operators and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ts_kernels._backend import on_device_of, runs_eagerly, use_triton
from ts_kernels._library import define_op, not_twice_differentiable
from ts_kernels._rms_norm_plan import backward_plan, forward_plan, mean_factor

# The kernels hold whole rows in registers; wider rows take the PyTorch path.
_WIDEST = 32768


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, with the rounding steps of the Llama formula.

        h = x.float();  h = h * rsqrt(mean(h^2) + eps);  y = weight * h.to(x.dtype)

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    On the CPU the result is that formula's, bit for bit. On CUDA the kernel adds up the squares
    in the order of torch's own reduction, so that it equals the formula run op by op by torch
    for contiguous x whose last dimension is a multiple of 4 (or below 128), on the torch versions
    that README.md names; otherwise rstd may differ in its last bit, which after rounding to bf16
    changes few elements. Gradients are computed in fp32 and rounded once. The weight gradient is
    summed in an order that depends on the shape alone; a frozen weight costs no gradient work.
    float64 is computed in float64, by plain PyTorch. Runs on the current stream.

    Args:
        x: [..., D], D >= 1; any strides; may be empty. float32, bfloat16, float16 or float64.
        weight: [D], any of these dtypes.
        eps: added to the mean square.

    Returns:
        Contiguous tensor of x's shape; its dtype is torch's promotion of x's and weight's.

    Raises:
        ValueError: a shape, dtype or device does not fit.
        NotImplementedError: the gradient is differentiated again.

    Example:
        >>> x = torch.randn(2, 3, 8)
        >>> y = rms_norm(x, torch.ones(8), 1e-6)
    """
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise ValueError(
            f"x has dtype {x.dtype} and weight {weight.dtype}; expected floating dtypes."
        )
    if x.dim() < 1 or x.shape[-1] < 1 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; expected x [..., D] "
            f"and weight [D] with the same D of at least 1."
        )
    if x.device != weight.device:
        raise ValueError(
            f"x is on {x.device} and weight on {weight.device}; expected one device. Move one of "
            f"them."
        )
    if not torch.compiler.is_compiling() and runs_eagerly(x, weight):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            apply: Any = _EagerRMSNorm.apply
            y: Tensor = apply(x, weight, eps)
            return y
        return _forward(x, weight, eps)[0]
    y = torch.ops.ts_kernels.rms_norm(x, weight, eps)[0]
    return y


def _stat_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, rstd [...])."""
    if x.numel() and x.shape[-1] <= _WIDEST and use_triton(x, weight):
        return _launch_forward(x, weight, eps)
    h = x.to(_stat_dtype(x))
    rstd = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    y = weight * (h * rstd).to(x.dtype)
    return y.contiguous(), rstd.squeeze(-1).contiguous()


def _forward_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype)),
        x.new_empty(x.shape[:-1], dtype=_stat_dtype(x)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, rstd)


def _autograd(
    ctx: Any, dy: Tensor | None, unused: Any
) -> tuple[Tensor | None, Tensor | None, None]:
    if dy is None:
        return None, None, None
    x, weight, rstd = ctx.saved_tensors
    want_x, want_weight, _ = ctx.needs_input_grad
    dx, dw = torch.ops.ts_kernels.rms_norm_backward(dy, x, weight, rstd, want_x, want_weight)
    return (dx if want_x else None), (dw if want_weight else None), None


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, want_x: bool, want_weight: bool
) -> tuple[Tensor, Tensor]:
    """(dx, dw); a size of 0 if not wanted."""
    if (
        x.numel()
        and x.shape[-1] <= _WIDEST
        and use_triton(x, weight, dy)
        and (want_x or want_weight)
    ):
        return _launch_backward(dy, x, weight, rstd, want_x, want_weight)
    dx, dw = x.new_empty(0), weight.new_empty(0)
    rstd = rstd.unsqueeze(-1)
    xhat = x.to(rstd.dtype) * rstd
    wide_dy = dy.to(rstd.dtype)
    if want_x:
        wdy = wide_dy * weight.to(rstd.dtype)
        mean = (wdy * xhat).mean(-1, keepdim=True)
        dx = ((wdy - xhat * mean) * rstd).to(x.dtype).contiguous()
    if want_weight:
        products = wide_dy * xhat.to(x.dtype).to(rstd.dtype)
        dw = products.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    return dx, dw


def _backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, want_x: bool, want_weight: bool
) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.shape if want_x else 0),
        weight.new_empty(weight.shape if want_weight else 0),
    )


define_op(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    _autograd,
    _setup_context,
)
define_op(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, bool want_x, "
    "bool want_weight) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
    not_twice_differentiable("rms_norm", "ts_kernels.reference.rms_norm"),
)


class _EagerRMSNorm(torch.autograd.Function):
    """The operator's implementation and autograd, called without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if torch.is_grad_enabled() or not runs_eagerly(grads[0]):
            return _autograd(ctx, grads[0], None)  # its operator refuses a second derivative
        x, weight, rstd = ctx.saved_tensors
        want_x, want_weight, _ = ctx.needs_input_grad
        dx, dw = _backward(grads[0], x, weight, rstd, want_x, want_weight)
        return (dx if want_x else None), (dw if want_weight else None), None


def _as_rows(x: Tensor) -> Tensor:
    """[..., D] -> [rows, D] with unit column stride, copied only if it must be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _launch_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from ts_kernels.triton_kernels.rms_norm import rms_norm_forward_kernel

    y, rstd = _forward_fake(x, weight, eps)
    x2 = _as_rows(x)
    rows, hidden = x2.shape
    plan = forward_plan(rows, hidden)
    width, height, vectorized = plan.reduction
    with on_device_of(x):
        rms_norm_forward_kernel[(-(-rows // plan.rows_per_program),)](
            x2,
            weight.contiguous(),
            y,
            rstd,
            x2.stride(0),
            rows,
            mean_factor(rows, hidden),
            float(eps),
            HIDDEN=hidden,
            ROWS=plan.rows_per_program,
            STEPS=plan.steps,
            MORE_STEPS=plan.more_steps,
            WIDTH=width,
            HEIGHT=height,
            VECTORIZED=vectorized,
            LOG_WIDTH=width.bit_length() - 1,
            LOG_HEIGHT=height.bit_length() - 1,
            num_warps=plan.num_warps,
            enable_fp_fusion=False,
        )
    return y, rstd


def _launch_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, want_x: bool, want_weight: bool
) -> tuple[Tensor, Tensor]:
    from ts_kernels.triton_kernels.rms_norm import rms_norm_backward_kernel, sum_parts_kernel

    x2, dy2 = _as_rows(x), _as_rows(dy)
    rows, hidden = x2.shape
    plan = backward_plan(rows, hidden, want_weight, x2.itemsize + dy2.itemsize)
    dx, dw = _backward_fake(dy, x, weight, rstd, want_x, want_weight)
    parts = rstd  # not written without a weight gradient
    if want_weight:
        parts = torch.empty((plan.programs, hidden), dtype=torch.float32, device=x.device)
    with on_device_of(x):
        rms_norm_backward_kernel[(plan.programs,)](
            dy2,
            x2,
            weight.contiguous(),
            rstd,
            dx,
            parts,
            dy2.stride(0),
            x2.stride(0),
            rows,
            plan.tiles_per_program,
            HIDDEN=hidden,
            ROWS=plan.rows_per_tile,
            BLOCK=plan.block,
            MORE=plan.more,
            WANT_X=want_x,
            WANT_WEIGHT=want_weight,
            STAGES=plan.stages,
            num_warps=plan.num_warps,
        )
        if want_weight:
            columns = 16
            sum_parts_kernel[(-(-hidden // columns),)](
                parts, dw, plan.programs, HIDDEN=hidden, ROWS=64, COLUMNS=columns, num_warps=4
            )
    return dx, dw
