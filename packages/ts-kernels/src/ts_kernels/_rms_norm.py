"""RMSNorm: operators and the public function."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ts_kernels import _rms_norm_launch as launch
from ts_kernels._backend import runs_eagerly
from ts_kernels._library import define_op, not_twice_differentiable
from ts_kernels._recipes import note
from ts_kernels._rms_norm_launch import Form


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, round_first: bool = True
) -> Tensor:
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
        offset: added to the weight, in float32: 1 for Gemma.
        round_first: True: h is rounded to x's dtype before the weight (Llama, Qwen, Mistral).
            False: only the product is rounded, to x's dtype (Gemma, OLMo 2).

    Returns:
        Contiguous tensor of x's shape; its dtype is torch's promotion of x's and weight's, or x's
        with `round_first=False`.

    Raises:
        ValueError: a shape, dtype or device does not fit.
        NotImplementedError: the gradient is differentiated again.

    Example:
        >>> x = torch.randn(2, 3, 8)
        >>> y = rms_norm(x, torch.ones(8), 1e-6)
        >>> gemma = rms_norm(x, torch.zeros(8), 1e-6, offset=1.0, round_first=False)
    """
    check_norm(x, weight)
    if not torch.compiler.is_compiling() and runs_eagerly(x, weight):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            apply: Any = _EagerRMSNorm.apply
            form = Form(eps, offset, round_first)
            y: Tensor = apply(x, weight, form)
            return note(y, functools.partial(_normed, form=form), x, weight)
        return launch.forward(x, None, weight, Form(eps, offset, round_first)).y
    y = torch.ops.ts_kernels.rms_norm(x, weight, eps, offset, round_first)[0]
    return y


def _normed(x: Tensor, weight: Tensor, form: Form) -> Tensor:
    return launch.forward(x, None, weight, form).y


def check_norm(x: Tensor, weight: Tensor) -> None:
    """Raises ValueError where x [..., D] and weight [D] do not fit together."""
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


def _implementation(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_first: bool = True
) -> tuple[Tensor, Tensor]:
    normed = launch.forward(x, None, weight, Form(eps, offset, round_first))
    return normed.y, normed.rstd


def _fake(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_first: bool = True
) -> tuple[Tensor, Tensor]:
    return launch.empty_forward(x, weight, Form(eps, offset, round_first))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, *form = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, rstd)
    ctx.form = Form(*form)


def _autograd(ctx: Any, dy: Tensor | None, unused: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    x, weight, rstd = ctx.saved_tensors
    want_x, want_weight = ctx.needs_input_grad[:2]
    dx, dw = torch.ops.ts_kernels.rms_norm_backward(
        dy, x, weight, rstd, want_x, want_weight, ctx.form.offset, ctx.form.round_first
    )
    return (dx if want_x else None), (dw if want_weight else None), None, None, None


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    want_x: bool,
    want_weight: bool,
    offset: float = 0.0,
    round_first: bool = True,
) -> tuple[Tensor, Tensor]:
    form = Form(0.0, offset, round_first)
    return launch.backward(dy, None, x, weight, rstd, form, want_x, want_weight)


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    want_x: bool,
    want_weight: bool,
    offset: float = 0.0,
    round_first: bool = True,
) -> tuple[Tensor, Tensor]:
    return launch.empty_backward(x, weight, want_x, want_weight)


define_op(
    "rms_norm(Tensor x, Tensor weight, float eps, float offset=0.0, bool round_first=True) "
    "-> (Tensor, Tensor)",
    _implementation,
    _fake,
    _autograd,
    _setup_context,
)
define_op(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, bool want_x, "
    "bool want_weight, float offset=0.0, bool round_first=True) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
    not_twice_differentiable("rms_norm", "ts_kernels.reference.rms_norm"),
)


class _EagerRMSNorm(torch.autograd.Function):
    """The operator's implementation and autograd, called without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, form: Form) -> Tensor:
        y, rstd, _ = launch.forward(x, None, weight, form)
        ctx.save_for_backward(x, weight, rstd)
        ctx.form = form
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or not runs_eagerly(grads[0]):
            return _autograd(ctx, grads[0], None)[:3]  # its operator refuses a second derivative
        x, weight, rstd = ctx.saved_tensors
        want_x, want_weight, _ = ctx.needs_input_grad
        dx, dw = launch.backward(grads[0], None, x, weight, rstd, ctx.form, want_x, want_weight)
        return (dx if want_x else None), (dw if want_weight else None), None
