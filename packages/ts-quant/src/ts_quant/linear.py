"""F.linear with a frozen, encoded weight.

    y = x @ W.T + bias          grad_x = grad_y @ W          grad_bias = sum of grad_y

W is decoded for the forward product and again for the backward one; neither copy outlives its
product and x is not saved (a frozen weight needs no gradient). The autograd node keeps the weight
object, not its buffers, so the buffers may be replaced between forward and backward.

Where the GPU has tensor cores for the weight's own format (FP8 on sm_89 and later, NVFP4 on sm_100)
and the compute dtype is bf16, the forward product runs on them, with x quantized
(`ts_quant.matmul`), unless the matrix is so small that this saves no time;
`ts_quant.configure_matmul(model, tensor_cores=False)` turns it off. Backward decodes, unless
`fp8_backward` or `nvfp4_backward` of `configure_matmul` lets it run on them too.

Otherwise products, layouts and reductions are those PyTorch uses for an ordinary frozen weight, so
results and gradients equal its results and gradients on the decoded weight bit for bit.
(Exception: an input of three or more dimensions with no bias whose leading dimensions cannot be
flattened; torch then runs a batched product and this module a flat one.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ts_quant.errors import OptionError
from ts_quant.matmul import nvfp4
from ts_quant.matmul.dispatch import (
    NVFP4,
    TENSOR_CORE_CODECS,
    prepare,
    prepared_gradient_kind,
    product,
)
from ts_quant.matmul.fp8 import ROWS
from ts_quant.matmul.fp8_backward import fp8_input_gradient

if TYPE_CHECKING:
    from ts_quant.tensor import QuantTensor


def frozen_linear(x: Tensor, weight: QuantTensor, bias: Tensor | None = None) -> Tensor:
    """y = x @ W.T + bias, differentiable in x and bias.

    Under autocast x, bias and the decoded weight take the autocast dtype, as in torch's linear.

    Args:
        x: [..., in_features], on the device of the weight's buffers.
        weight: encoded [out_features, in_features].
        bias: [out_features] or None.

    Returns:
        [..., out_features], in the compute dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices that torch's linear refuses on the decoded weight.
    """
    given = x
    dtype = weight._decoded_dtype
    target = _autocast_dtype(x.device.type)
    if target is not None:
        x = _autocast(x, target)
        bias = None if bias is None else _autocast(bias, target)
        dtype = _autocast_of(dtype, target)
    prepared = None
    if weight._spec.codec in TENSOR_CORE_CODECS and x.dtype is dtype:
        prepared = prepare(given, x, weight, bias)
    kind, tensors = (None, ()) if prepared is None else (prepared.kind, prepared.tensors)
    needs_grad = x.requires_grad or (bias is not None and bias.requires_grad)
    if needs_grad and torch.is_grad_enabled():
        y: Tensor = _FrozenLinear.apply(x, weight, bias, dtype, kind, *tensors)  # type: ignore[no-untyped-call]
        return y
    return _product(x, weight, bias, dtype, kind, tensors)


def _product(
    x: Tensor,
    weight: QuantTensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    kind: str | None,
    tensors: tuple[Tensor, ...],
) -> Tensor:
    if kind is None:
        return torch.nn.functional.linear(x, _decode(weight, dtype), bias)
    y = product(kind, tensors, x, weight, bias)
    return y.view(*x.shape[:-1], y.shape[-1])


def input_gradient(weight: QuantTensor, grad: Tensor) -> Tensor:
    """See `QuantTensor.input_gradient`."""
    shape = weight._decoded_shape
    if len(shape) != 2 or grad.dim() != 2 or grad.shape[1] != shape[0]:
        raise OptionError(
            f"input_gradient() takes a gradient [M, N] of a weight [N, K], not {tuple(grad.shape)} "
            f"of {tuple(shape)}"
        )
    if not grad.dtype.is_floating_point:
        raise OptionError(
            f"input_gradient() takes a gradient of a floating dtype, not {grad.dtype}"
        )
    with torch.no_grad():
        kind = prepared_gradient_kind(weight, grad)
        w = None if kind == ROWS else weight.dequantize().to(grad.dtype)
        return _gradient(kind, grad, weight, w, False)


def _gradient(
    kind: str | None, grad: Tensor, weight: QuantTensor, decoded: Tensor | None, transposed: bool
) -> Tensor:
    """grad [M, N] @ W, where `decoded` is None only for FP8's kind."""
    if decoded is None:
        return fp8_input_gradient(grad, weight.buffers(), weight._spec)
    if kind == NVFP4:
        return nvfp4.input_gradient(grad, decoded)
    return decoded.t().mm(grad.t()).t() if transposed else grad.mm(decoded)


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: QuantTensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        kind: str | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.weight = weight
        ctx.n_tensors = len(tensors)
        ctx.dtype = dtype
        # Compiled code would be compiled again for every new count.
        ctx.edits = None if torch.compiler.is_compiling() else weight._edits.count
        # Which product PyTorch's backward would run depends on x's layout, not on its values.
        ctx.transposed = x.dim() == 2 and x.stride() == (1, x.shape[0])
        ctx.flat_bias = x.dim() <= 2 or (x.dim() == 3 and x.is_contiguous())
        ctx.bias_shape = None if bias is None else bias.shape
        return _product(x, weight, bias, dtype, kind, tensors)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_changed(ctx)
        with torch.no_grad():
            grad_x = grad_bias = None
            # Not reshape(-1, n), which cannot tell how many rows of no columns there are.
            grad_2d = grad_y.flatten(0, -2) if grad_y.dim() > 1 else grad_y[None]
            if ctx.needs_input_grad[0]:
                kind = prepared_gradient_kind(ctx.weight, grad_2d)
                w = None if kind == ROWS else _decode_again(ctx.weight, ctx.dtype)
                flat = _gradient(kind, grad_2d, ctx.weight, w, ctx.transposed)
                grad_x = flat.view(*grad_y.shape[:-1], flat.shape[1])
                del w
            if ctx.needs_input_grad[2]:
                grad_bias = (grad_2d if ctx.flat_bias else grad_y).sum_to_size(ctx.bias_shape)
        if torch.is_grad_enabled() and grad_y.requires_grad:
            grad_x = None if grad_x is None else _refuse_second(grad_x, grad_y)
            grad_bias = None if grad_bias is None else _refuse_second(grad_bias, grad_y)
        return grad_x, None, grad_bias, None, None, *[None] * ctx.n_tensors


class _NoSecondDerivative(torch.autograd.Function):
    """Passes a gradient on; its own backward is the error."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, grad_y: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "the linear layer of a quantized weight has no second derivative (create_graph=True "
            "was used through it); differentiate it once, or dequantize the weight first"
        )


def _refuse_second(grad: Tensor, grad_y: Tensor) -> Tensor:
    refused: Tensor = _NoSecondDerivative.apply(grad, grad_y)  # type: ignore[no-untyped-call]
    return refused


def _decode(weight: QuantTensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, rounded as if its full-precision self had been cast to it."""
    direct = _direct_dtype(weight, dtype)
    dense = weight.dequantize(direct)
    return dense if direct is dtype else dense.to(dtype)


def _decode_again(weight: QuantTensor, dtype: torch.dtype) -> Tensor:
    """The same values for backward, by way of the out-variant.

    The two calls being different operations, torch.compile cannot merge them into one decode
    whose full-precision result it would save from forward to backward.
    """
    direct = _direct_dtype(weight, dtype)
    device = weight.buffers()[0].device
    dense = torch.empty(weight._decoded_shape, dtype=direct, device=device)
    weight._decode_out(dense)
    return dense if direct is dtype else dense.to(dtype)


def _direct_dtype(weight: QuantTensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype to decode to on the way to `dtype`: never skip a rounding of the weight's own."""
    own = weight._decoded_dtype
    return dtype if own is torch.float32 or own is torch.float64 else own


def _refuse_changed(ctx: Any) -> None:
    if ctx.edits is not None and ctx.weight._edits.count != ctx.edits:
        raise RuntimeError(
            "a quantized weight was modified in place (copy_ or load_state_dict) between forward "
            "and backward, so its gradient would be that of other values; load weights only "
            "outside a forward/backward pair"
        )


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype autocast is set to for this device type, or None when it is off."""
    if not torch.amp.is_autocast_available(device_type):
        return None
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _autocast_of(dtype: torch.dtype, target: torch.dtype) -> torch.dtype:
    """What autocast makes of a floating dtype: float64 is left alone."""
    return dtype if dtype is torch.float64 or not dtype.is_floating_point else target


def _autocast(tensor: Tensor, target: torch.dtype) -> Tensor:
    return tensor.to(_autocast_of(tensor.dtype, target))
