"""Products with float32 matrices on bfloat16 tensor cores, of 16 bits instead of 8.

A float32 value v is the sum of two bfloat16 values, high and low, but for its last 8 bits; their
products with bfloat16 values are exact in float32, where they are summed. A float32 factor F is
kept as three parts (high, high, low):

    bfloat16 x times F:             x @ (high + low)                  the last two parts
    float32 G times F:              G.high F.high + G.low F.high + G.high F.low
    where G is kept as (high, low, high), so that each part of one meets one of the other
"""

from __future__ import annotations

import torch
from torch import Tensor

from ts_kernels._backend import on_device_of, use_triton

_BLOCK = 1024


def factor_rows(matrix: Tensor) -> Tensor:
    """float32 [R, C] -> bfloat16 [3 R, C]: high, high and low parts, one below the other."""
    rows, columns = matrix.shape
    out = torch.empty((3 * rows, columns), dtype=torch.bfloat16, device=matrix.device)
    return _split(matrix, out, columns, rows * columns, 1.0, None, low=2)


def factor_columns(matrix: Tensor) -> Tensor:
    """float32 [R, C] -> bfloat16 [R, 3 C]: high, high and low parts, side by side."""
    rows, columns = matrix.shape
    out = torch.empty((rows, 3 * columns), dtype=torch.bfloat16, device=matrix.device)
    return _split(matrix, out, 3 * columns, columns, 1.0, None, low=2)


def merge_and_split(parts: Tensor, scale: float) -> Tensor:
    """float32 [R, 2 C] -> bfloat16 [R, 3 C]: high, low, high of scale * (left + right half)."""
    rows, columns = parts.shape[0], parts.shape[1] // 2
    out = torch.empty((rows, 3 * columns), dtype=torch.bfloat16, device=parts.device)
    return _split(parts, out, 3 * columns, columns, scale, columns, low=1)


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of bfloat16 or float16 matrices, in float32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _split(
    source: Tensor,
    out: Tensor,
    out_stride: int,
    out_part: int,
    scale: float,
    part: int | None,
    low: int,
) -> Tensor:
    source = source.contiguous()
    columns = source.shape[1] if part is None else part
    elements = source.shape[0] * columns
    if not elements or not use_triton(source, out):
        value = source[:, :columns]
        if part is not None:
            value = value + source[:, columns:]
        value = value * scale
        high = value.to(torch.bfloat16)
        parts = [high, high, high]
        parts[low] = (value - high).to(torch.bfloat16)
        out.copy_(torch.cat(parts, dim=0 if out_stride == columns else 1))
        return out
    from ts_kernels.triton_kernels.split import split_kernel

    with on_device_of(source):
        split_kernel[(-(-elements // _BLOCK),)](
            source,
            out,
            source.stride(0),
            columns,
            out_stride,
            out_part,
            elements,
            columns,
            float(scale),
            HAS_PARTS=part is not None,
            LOW=low,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
