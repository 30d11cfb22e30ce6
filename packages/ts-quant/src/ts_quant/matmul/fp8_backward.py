"""grad_x = grad_y @ W on FP8 tensor cores, for a weight [N, K] that is stored as fp8.

    grad_x[m, k] = sum over n of grad_y[m, n] * code[n, k] * scale[n, k]

N is summed here, so a scale may depend on k but not on n, and tensor cores read the second operand
with N innermost: the weight is turned to e4m3 [K, N] first (`blocks_to_columns`, `turned`), which
reads and writes a byte per weight where decoding writes two.

    layout of W           grad_y                          W
    "e8m0" (blocks of 32) e4m3 by row                     codes times 2^(their scale - the column's)
    "tile" 1 x K (row)    times W's row scales in fp32,   codes as they are, column scales of 1
                          then e4m3 by row

A column's scale is the largest of its blocks. Only values under e4m3's normal range of 2^-6
relative to it change, as in forward (`ts_quant.matmul.fp8`). The product is summed in fp32 and
rounded once to bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ts_quant.codecs import tables
from ts_quant.codecs.backend import use_triton
from ts_quant.codecs.base import QuantSpec
from ts_quant.codecs.lookup import e4m3_values
from ts_quant.codecs.operators import eager
from ts_quant.matmul.fp8 import scaled_mm_rows
from ts_quant.matmul.rows import fp8_rows, rows_reference


def blocks_to_columns(codes: Tensor, byte: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """A weight in blocks of 32 as e4m3 [K, N] with fp32 powers of two [1, K] as column scales."""
    if codes.is_cuda and use_triton():
        from ts_quant.matmul import columns_triton

        return columns_triton.blocks_to_columns(codes, byte, n, k)
    exponent = byte.view(n, k // 32).to(torch.int32)
    top = exponent.amax(dim=0)
    down = (exponent - top).add_(127).clamp_(min=0)
    factor = torch.index_select(tables.e8m0(codes.device), 0, down.view(-1)).view(down.shape)
    values = e4m3_values(codes.view(n, k // 32, 32)) * factor[:, :, None]
    scale = torch.index_select(tables.e8m0(codes.device), 0, top).repeat_interleave(32)
    return values.view(n, k).to(torch.float8_e4m3fn).t().contiguous(), scale.view(1, k)


def turned(codes: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """A weight's codes as e4m3 [K, N], with column scales [1, K] of 1."""
    if codes.is_cuda and use_triton():
        from ts_quant.matmul import columns_triton

        return columns_triton.turned(codes, n, k)
    w = codes.view(n, k).view(torch.float8_e4m3fn).t().contiguous()
    return w, torch.ones(1, k, device=codes.device)


def _operands(
    grad: Tensor, codes: Tensor, scale: Tensor, blocks_of_32: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """grad's codes (uint8) and scales [M, 1], the weight's [K, N] and [1, K]."""
    n = grad.shape[1]
    k = codes.numel() // n
    if blocks_of_32:
        return *fp8_rows(grad), *blocks_to_columns(codes, scale, n, k)
    if grad.is_cuda and use_triton():
        from ts_quant.matmul import rows_triton

        return *rows_triton.rows(grad, scale.view(n)), *turned(codes, n, k)
    return *rows_reference(grad.to(torch.float32) * scale.view(1, n)), *turned(codes, n, k)


def _gradient(grad: Tensor, codes: Tensor, scale: Tensor, blocks_of_32: bool) -> Tensor:
    g, g_scale, w, w_scale = _operands(grad, codes, scale, blocks_of_32)
    return scaled_mm_rows(g.view(torch.float8_e4m3fn), w, g_scale, w_scale, None)


def gradient_reference(grad: Tensor, codes: Tensor, scale: Tensor, blocks_of_32: bool) -> Tensor:
    """The same product in fp32 on any device, rounded once to bf16."""
    g, g_scale, w, w_scale = _operands(grad, codes, scale, blocks_of_32)
    # Scales last, as tensor cores have it: a code times 2^127 may overflow where the sum does not.
    product = (e4m3_values(g) @ w.to(torch.float32).t()) * g_scale * w_scale
    return product.to(torch.bfloat16)


def _gradient_fake(grad: Tensor, codes: Tensor, scale: Tensor, blocks_of_32: bool) -> Tensor:
    k = codes.numel() // grad.shape[1]
    return grad.new_empty((grad.shape[0], k), dtype=torch.bfloat16)


torch.library.define(
    "ts_quant::fp8_input_gradient",
    "(Tensor grad, Tensor codes, Tensor scale, bool blocks_of_32) -> Tensor",
)
torch.library.impl("ts_quant::fp8_input_gradient", "CompositeExplicitAutograd", gradient_reference)
torch.library.impl("ts_quant::fp8_input_gradient", "CUDA", _gradient)
torch.library.register_fake("ts_quant::fp8_input_gradient", _gradient_fake)


def fp8_input_gradient(grad: Tensor, buffers: Sequence[Tensor], spec: QuantSpec) -> Tensor:
    """bf16 [M, K] of a gradient [M, N] and the buffers of an fp8 weight [N, K].

    Runs on the current stream and waits for nothing; may be captured in a CUDA graph.
    """
    codes, scale = buffers
    blocks = spec.scales == "e8m0"
    if eager(grad) and eager(codes) and not torch.is_grad_enabled():
        run = _gradient if grad.is_cuda else gradient_reference
        return run(grad, codes, scale, blocks)
    made: Tensor = torch.ops.ts_quant.fp8_input_gradient(grad, codes, scale, blocks)
    return made
