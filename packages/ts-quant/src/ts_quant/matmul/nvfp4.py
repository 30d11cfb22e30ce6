"""y = x @ W.T on NVFP4 tensor cores (sm_100 and later). Not run on such a GPU yet.

Both operands are e2m1 in blocks of 16 along the summed dimension, with e4m3 scales and one fp32
number per operand (`ts_quant.codecs.fp4`). The hardware wants the e4m3 scales in tiles of 128 rows
x 4 columns, rows and columns padded to whole tiles: element (r, c) of a tile sits at
(r % 32) * 16 + (r // 32) * 4 + c.

    y = (x_q @ W_q.T) * x_global * W_global       summed in fp32, rounded to bf16, then multiplied

With outliers, the input channels of the largest magnitude are taken out of x_q and multiplied in
bf16 with the decoded columns of W. They are picked on the device; the host does not wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ts_quant.codecs import tables
from ts_quant.codecs.base import QuantSpec
from ts_quant.codecs.fp4 import e2m1_codes
from ts_quant.codecs.scales import LAYOUTS, UnitRange

BLOCK = 16
MULTIPLE = 32  # of which rows and columns of a weight must be
_UNIT = UnitRange(6.0, round_up=False)


@cache
def supported(device: torch.device) -> bool:
    """Whether the device has NVFP4 tensor cores and this torch a product for them."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    new_enough = torch.cuda.get_device_capability(device) >= (10, 0)
    return new_enough and hasattr(torch, "float4_e2m1fn_x2")


def takes(spec: QuantSpec, shape: Sequence[int]) -> bool:
    """Whether a weight's blocks run along its rows, in sizes the hardware takes."""
    n, k = shape
    return spec.codec == "nvfp4" and n % MULTIPLE == 0 and k % MULTIPLE == 0


def swizzle(scale: Tensor) -> Tensor:
    """Scales [rows, columns], one byte each, in the hardware's order; flat, padded with zeros."""
    rows, columns = scale.shape
    padded = torch.nn.functional.pad(scale, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(flat: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `swizzle`."""
    tiles = flat.view(-(-rows // 128), -(-columns // 4), 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-(-rows // 128) * 128, -1)[:rows, :columns]


def _quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m, k = x.shape
    blocks = x.to(torch.float32).view(m * k // BLOCK, BLOCK)
    (scale, global_scale), value = LAYOUTS["e4m3"].encode(blocks.abs().amax(dim=1), _UNIT)
    codes = e2m1_codes(blocks / value[:, None]).view(m, k)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed, scale.view(m, k // BLOCK), global_scale


def _quantize_fake(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m, k = x.shape
    return (
        x.new_empty((m, k // 2), dtype=torch.uint8),
        x.new_empty((m, k // BLOCK), dtype=torch.uint8),
        x.new_empty((1,), dtype=torch.float32),
    )


def _decoded(codes: Tensor, scale: Tensor) -> Tensor:
    """fp32 [rows, K] without the global number."""
    rows, half = codes.shape
    pairs = torch.index_select(
        tables.e2m1_pairs(codes.device), 0, codes.reshape(-1).to(torch.int32)
    )
    factor = torch.index_select(tables.e4m3(codes.device), 0, scale.reshape(-1).to(torch.int32))
    values = pairs.view(torch.float32).view(-1, BLOCK) * factor[:, None]
    return values.view(rows, half * 2)


def mm_reference(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, alpha: Tensor) -> Tensor:
    """The product in fp32 on any device."""
    product = _decoded(a, a_scale) @ _decoded(b, b_scale).t()
    return product.to(torch.bfloat16) * alpha.to(torch.float32)


def _mm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, alpha: Tensor) -> Tensor:
    if not supported(a.device):
        return mm_reference(a, a_scale, b, b_scale, alpha).to(torch.bfloat16)
    pair = torch.float4_e2m1fn_x2
    product = torch._scaled_mm(
        a.view(pair),
        b.view(pair).t(),
        scale_a=swizzle(a_scale).view(torch.float8_e4m3fn),
        scale_b=swizzle(b_scale).view(torch.float8_e4m3fn),
        out_dtype=torch.bfloat16,
    )
    return (product * alpha).to(torch.bfloat16)


def _mm_cpu(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, alpha: Tensor) -> Tensor:
    return mm_reference(a, a_scale, b, b_scale, alpha).to(torch.bfloat16)


def _mm_fake(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, alpha: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)


torch.library.define(
    "ts_quant::nvfp4_quantize", "(Tensor x) -> (Tensor codes, Tensor scale, Tensor global_scale)"
)
torch.library.impl("ts_quant::nvfp4_quantize", "CompositeExplicitAutograd", _quantize)
torch.library.register_fake("ts_quant::nvfp4_quantize", _quantize_fake)
torch.library.define(
    "ts_quant::nvfp4_mm",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor alpha) -> Tensor",
)
torch.library.impl("ts_quant::nvfp4_mm", "CompositeExplicitAutograd", _mm_cpu)
torch.library.impl("ts_quant::nvfp4_mm", "CUDA", _mm)
torch.library.register_fake("ts_quant::nvfp4_mm", _mm_fake)


def quantize_activation(x: Tensor, outliers: float) -> list[Tensor]:
    """x [M, K] for `linear`: codes, scales and global number, then outlier columns and indices.

    Args:
        x: bf16 (or any floating dtype), K a multiple of 32.
        outliers: share of the K channels kept out of the codes; 0 leaves the last two away.
    """
    if not outliers:
        return list(torch.ops.ts_quant.nvfp4_quantize(x))
    count = max(1, math.ceil(outliers * x.shape[1]))
    channels = torch.topk(x.abs().amax(dim=0), count).indices
    kept = x.index_select(1, channels)
    rest = x.index_fill(1, channels, 0.0)
    return [*torch.ops.ts_quant.nvfp4_quantize(rest), kept, channels]


def linear(
    prepared: Sequence[Tensor], buffers: Sequence[Tensor], spec: QuantSpec, shape: Sequence[int]
) -> Tensor:
    """bf16 [M, N] of `quantize_activation`'s tensors and an nvfp4 weight's buffers [N, K]."""
    n, k = shape
    x_codes, x_scale, x_global, *outliers = prepared
    codes, scale, global_scale = buffers
    factor = global_scale.reciprocal() if spec.scales == "e4m3_div" else global_scale
    y: Tensor = torch.ops.ts_quant.nvfp4_mm(
        x_codes, x_scale, codes.view(n, k // 2), scale.view(n, k // BLOCK), x_global * factor
    )
    if outliers:
        kept, channels = outliers
        y = y + kept.to(torch.bfloat16) @ columns(buffers, spec, shape, channels).t()
    return y


def columns(
    buffers: Sequence[Tensor], spec: QuantSpec, shape: Sequence[int], channels: Tensor
) -> Tensor:
    """bf16 [N, channels]: those columns of the decoded weight."""
    n, k = shape
    codes, scale, global_scale = buffers
    picked: Tensor = torch.ops.ts_quant.nvfp4_columns(
        codes.view(n, k // 2), scale.view(n, k // BLOCK), global_scale, spec.scales, channels
    )
    return picked


def _columns(
    codes: Tensor, scale: Tensor, global_scale: Tensor, scales: str, channels: Tensor
) -> Tensor:
    byte = codes.index_select(1, channels // 2)
    nibble = (byte >> (channels % 2 * 4).to(torch.uint8)) & 15
    magnitude = torch.index_select(
        tables.e2m1(codes.device), 0, (nibble & 7).view(-1).to(torch.int32)
    ).view(nibble.shape)
    unit = torch.where(nibble >= 8, -magnitude, magnitude)
    block = scale.index_select(1, channels // BLOCK)
    value = LAYOUTS[scales].read((block.reshape(-1), global_scale), 0, block.numel())
    return (unit * value.view(block.shape)).to(torch.bfloat16)


def _columns_fake(
    codes: Tensor, scale: Tensor, global_scale: Tensor, scales: str, channels: Tensor
) -> Tensor:
    return codes.new_empty((codes.shape[0], channels.shape[0]), dtype=torch.bfloat16)


torch.library.define(
    "ts_quant::nvfp4_columns",
    "(Tensor codes, Tensor scale, Tensor global_scale, str scales, Tensor channels) -> Tensor",
)
torch.library.impl("ts_quant::nvfp4_columns", "CompositeExplicitAutograd", _columns)
torch.library.register_fake("ts_quant::nvfp4_columns", _columns_fake)


def input_gradient(grad_y: Tensor, weight: Tensor) -> Tensor:
    """grad_y [M, N] @ weight [N, K] in NVFP4; blocks run along N, so the weight is encoded anew."""
    g_codes, g_scale, g_global = torch.ops.ts_quant.nvfp4_quantize(grad_y)
    w_codes, w_scale, w_global = torch.ops.ts_quant.nvfp4_quantize(weight.t().contiguous())
    grad_x: Tensor = torch.ops.ts_quant.nvfp4_mm(
        g_codes, g_scale, w_codes, w_scale, g_global * w_global
    )
    return grad_x
