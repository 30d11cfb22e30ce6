"""Activations as FP8 for tensor cores: e4m3 codes with one fp32 scale per row, or per 128 columns.

    scale = max(amax / 448, 2^-100)          q = e4m3(x * (1 / scale)), nearest, ties to even

Operators `ts_quant::fp8_rows` and `ts_quant::fp8_groups`. NaN and infinity in a row make NaN codes,
so the product of that row is NaN, as it would be without quantization.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ts_quant.codecs.backend import use_triton
from ts_quant.codecs.operators import eager

GROUP = 128
_LARGEST = 448.0
_SMALLEST_SCALE = 2.0**-100


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes (uint8) and fp32 scales [..., 1] along the last dimension of fp32 x."""
    amax = x.abs().amax(dim=-1, keepdim=True)
    scale = (amax / amax.new_tensor(_LARGEST)).clamp_(min=_SMALLEST_SCALE)
    unit = (x * scale.reciprocal()).clamp_(-_LARGEST, _LARGEST)
    return unit.to(torch.float8_e4m3fn).view(torch.uint8), scale


def rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8_rows` in plain PyTorch."""
    codes, scale = _quantized(x.to(torch.float32))
    return _laid_out(codes, x.shape), _laid_out(scale, (x.shape[0], 1))


def groups_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8_groups` in plain PyTorch."""
    m, k = x.shape
    codes, scale = _quantized(x.to(torch.float32).reshape(m, k // GROUP, GROUP))
    groups = scale.reshape(m, k // GROUP).t()
    return _laid_out(codes, (m, k)), _laid_out(groups, (k // GROUP, m))


def _laid_out(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor with the strides of a new one, as the fakes promise, also where sizes are 1."""
    return tensor.reshape(-1).view(shape)


def _rows_cuda(x: Tensor) -> tuple[Tensor, Tensor]:
    if not use_triton():
        return rows_reference(x)
    from ts_quant.matmul import rows_triton

    return rows_triton.rows(x)


def _groups_cuda(x: Tensor) -> tuple[Tensor, Tensor]:
    if not use_triton():
        return groups_reference(x)
    from ts_quant.matmul import rows_triton

    return rows_triton.groups(x)


def _rows_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    return x.new_empty((m, k), dtype=torch.uint8), x.new_empty((m, 1), dtype=torch.float32)


def _groups_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    return x.new_empty((m, k), dtype=torch.uint8), x.new_empty((k // GROUP, m), dtype=torch.float32)


for _name, _reference, _cuda, _fake in (
    ("fp8_rows", rows_reference, _rows_cuda, _rows_fake),
    ("fp8_groups", groups_reference, _groups_cuda, _groups_fake),
):
    torch.library.define(f"ts_quant::{_name}", "(Tensor x) -> (Tensor codes, Tensor scale)")
    torch.library.impl(f"ts_quant::{_name}", "CompositeExplicitAutograd", _reference)
    torch.library.impl(f"ts_quant::{_name}", "CUDA", _cuda)
    torch.library.register_fake(f"ts_quant::{_name}", _fake)


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] as e4m3 (uint8) [M, K] and fp32 scales [M, 1]."""
    if eager(x):
        return _rows_cuda(x) if x.is_cuda else rows_reference(x)
    codes, scale = torch.ops.ts_quant.fp8_rows(x)
    return codes, scale


def fp8_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K], K a multiple of 128, as e4m3 (uint8) [M, K] and fp32 scales [K / 128, M]."""
    if eager(x):
        return _groups_cuda(x) if x.is_cuda else groups_reference(x)
    codes, scale = torch.ops.ts_quant.fp8_groups(x)
    return codes, scale
