"""Small helpers about dtypes: autocast, and scaling a gradient with one rounding."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype in which hidden and an ordinary weight are multiplied, as `F.linear` has it.

    Raises:
        ValueError: the dtypes differ and no autocast would unite them.
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight is {weight.dtype}; expected one dtype. Convert "
            f"one of them, or call under torch.autocast."
        )
    return hidden.dtype


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """tensor.to(dtype), without the call where it has that dtype."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def matmul_dtype(tensor: Tensor, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a matmul's result can be had: CUDA gives 16-bit products in float32."""
    return torch.promote_types(torch.float32, compute_dtype) if tensor.is_cuda else compute_dtype


class _AutocastOff:
    """`torch.autocast(device_type, enabled=False)` without its bookkeeping of dtype and cache."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self._device_type, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self._device_type, True)


_NOTHING = nullcontext()


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Inside, operations on this tensor's device run in the dtypes they are given."""
    device_type = tensor.device.type
    if not torch.is_autocast_enabled(device_type):
        return _NOTHING
    if torch.compiler.is_compiling():  # which knows this class and its effect
        return torch.autocast(device_type, enabled=False)
    return _AutocastOff(device_type)


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * factor in a new tensor of `dtype`, multiplied in at least fp32.

    The factor (one element, or broadcastable with the gradient) stays as precise as it is: on
    CUDA torch would round a 0-d factor to the dtype of the gradient first.
    """
    if factor.dim() == 0:
        factor = factor.reshape(1)
    if gradient.dtype == dtype == factor.dtype:
        return gradient * factor
    out = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    return torch.mul(gradient, factor, out=out)
