"""Residual addition and RMSNorm in one pass: operators and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ts_kernels import _rms_norm_launch as launch
from ts_kernels._backend import runs_eagerly
from ts_kernels._library import define_op, not_twice_differentiable
from ts_kernels._rms_norm import check_norm
from ts_kernels._rms_norm_launch import Form


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    round_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """The sum of x and residual, and the RMSNorm of that sum, reading each once.

        s = x + residual;  y = rms_norm(s, weight, eps)

    The sum is rounded to x's dtype before it is normed, so that both results are those of the two
    steps one after the other (`rms_norm` says how exact its own are). In backward the gradient
    that reaches the sum on other ways is added in fp32; x and residual receive the same tensor.
    Nothing but the sum, the weight and a factor per row is kept. Deterministic. Runs on the
    current stream.

    Args:
        x, residual: [..., D], same shape, dtype and device; any strides; may be empty.
        weight, eps, offset, round_first: as in `rms_norm`.

    Returns:
        (y, s): contiguous tensors of x's shape; s has x's dtype.

    Raises:
        ValueError: a shape, dtype or device does not fit.
        NotImplementedError: the gradient is differentiated again.

    Example:
        >>> x, residual = torch.randn(2, 2, 3, 8)
        >>> y, residual = add_rms_norm(x, residual, torch.ones(8), 1e-6)
    """
    check_norm(x, weight)
    if (x.shape, x.dtype, x.device) != (residual.shape, residual.dtype, residual.device):
        raise ValueError(
            f"x is {tuple(x.shape)}, {x.dtype} on {x.device} and residual "
            f"{tuple(residual.shape)}, {residual.dtype} on {residual.device}; expected the same. "
            f"Expand or convert one of them."
        )
    if not torch.compiler.is_compiling() and runs_eagerly(x, residual, weight):
        form = Form(eps, offset, round_first)
        if torch.is_grad_enabled() and (
            x.requires_grad or residual.requires_grad or weight.requires_grad
        ):
            apply: Any = _EagerAddRMSNorm.apply
            pair: tuple[Tensor, Tensor] = apply(x, residual, weight, form)
            return pair
        normed = launch.forward(x, residual, weight, form)
        return normed.y, normed.summed
    y, summed, _ = torch.ops.ts_kernels.add_rms_norm(x, residual, weight, eps, offset, round_first)
    return y, summed


def _implementation(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    normed = launch.forward(x, residual, weight, Form(eps, offset, round_first))
    return normed.y, normed.summed, normed.rstd


def _fake(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = launch.empty_forward(x, weight, Form(eps, offset, round_first))
    return y, x.new_empty(x.shape), rstd


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    _, _, weight, *form = inputs
    _, summed, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(summed, weight, rstd)
    ctx.form = Form(*form)


def _autograd(
    ctx: Any, dy: Tensor | None, dsum: Tensor | None, unused: Any
) -> tuple[Tensor | None, ...]:
    if dy is None:
        return dsum, dsum, None, None, None, None
    summed, weight, rstd = ctx.saved_tensors
    want_x = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
    want_weight = ctx.needs_input_grad[2]
    dx, dw = torch.ops.ts_kernels.add_rms_norm_backward(
        dy, dsum, summed, weight, rstd, want_x, want_weight, ctx.form.offset, ctx.form.round_first
    )
    return _picked(ctx, dx, dw)


def _picked(ctx: Any, dx: Tensor, dw: Tensor) -> tuple[Tensor | None, ...]:
    want_x, want_residual, want_weight = ctx.needs_input_grad[:3]
    return (
        dx if want_x else None,
        dx if want_residual else None,
        dw if want_weight else None,
        None,
        None,
        None,
    )


def _backward(
    dy: Tensor,
    dsum: Tensor | None,
    summed: Tensor,
    weight: Tensor,
    rstd: Tensor,
    want_x: bool,
    want_weight: bool,
    offset: float,
    round_first: bool,
) -> tuple[Tensor, Tensor]:
    form = Form(0.0, offset, round_first)
    return launch.backward(dy, dsum, summed, weight, rstd, form, want_x, want_weight)


def _backward_fake(
    dy: Tensor,
    dsum: Tensor | None,
    summed: Tensor,
    weight: Tensor,
    rstd: Tensor,
    want_x: bool,
    want_weight: bool,
    offset: float,
    round_first: bool,
) -> tuple[Tensor, Tensor]:
    return launch.empty_backward(summed, weight, want_x, want_weight)


define_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float offset, "
    "bool round_first) -> (Tensor, Tensor, Tensor)",
    _implementation,
    _fake,
    _autograd,
    _setup_context,
)
define_op(
    "add_rms_norm_backward(Tensor dy, Tensor? dsum, Tensor summed, Tensor weight, Tensor rstd, "
    "bool want_x, bool want_weight, float offset, bool round_first) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
    not_twice_differentiable("add_rms_norm", "ts_kernels.reference.add_rms_norm"),
)


class _EagerAddRMSNorm(torch.autograd.Function):
    """The operator's implementation and autograd, called without torch's dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, form: Form
    ) -> tuple[Tensor, Tensor]:
        y, rstd, summed = launch.forward(x, residual, weight, form)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(summed, weight, rstd)
        ctx.form = form
        return y, summed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, dsum = grads
        given = [grad for grad in grads if grad is not None]
        if dy is None or torch.is_grad_enabled() or not runs_eagerly(*given):
            return _autograd(ctx, dy, dsum, None)[:4]
        want_x = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        summed, weight, rstd = ctx.saved_tensors
        dx, dw = launch.backward(
            dy, dsum, summed, weight, rstd, ctx.form, want_x, ctx.needs_input_grad[2]
        )
        return _picked(ctx, dx, dw)[:4]
