# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Scales of flattened blocks in Triton kernels: what `scales.ScaleLayout.read` computes.

Kernels take four pointers for them, in the order of `scale_arguments`, and launch with
`enable_fp_fusion=False`, so that a product and a sum are rounded one after the other as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ts_quant.codecs import tables
from ts_quant.codecs.base import QuantSpec

LAYOUT_IDS = {"float32": 0, "log8": 1, "nested": 2, "e8m0": 3, "e4m3": 4, "e4m3_div": 5}
_FLOAT32 = tl.constexpr(0)
_LOG8 = tl.constexpr(1)
_NESTED = tl.constexpr(2)
_E8M0 = tl.constexpr(3)
_E4M3 = tl.constexpr(4)
_TWO_120 = tl.constexpr(2.0**120)


@triton.jit
def e4m3_value(byte):
    """fp32 values of e4m3 codes (int32 0..255), by bits: no FP8 hardware is needed.

    Exponent and mantissa moved to fp32's place are the value times 2^-120, denormals included.
    """
    magnitude = byte & 127
    bits = (magnitude << 20) | ((byte & 128) << 24)
    value = bits.to(tl.float32, bitcast=True) * _TWO_120
    return tl.where(magnitude == 127, float("nan"), value)


@triton.jit
def e8m0_value(byte):
    """fp32 values of e8m0 bytes (int32 0..255): 2^(byte - 127), 255 is NaN."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    bits = tl.where(byte == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def block_scale(s0, s1, s2, s3, index, live, SCALES: tl.constexpr):
    """fp32 scales of the blocks `index`, where `live`."""
    if SCALES == _FLOAT32:
        return tl.load(s0 + index, mask=live, other=0.0)
    elif SCALES == _LOG8:
        code = tl.load(s0 + index, mask=live, other=0).to(tl.int32)
        return tl.load(s2 + code) * tl.load(s1 + index // 256, mask=live, other=0.0)
    elif SCALES == _NESTED:
        code = tl.load(s0 + index, mask=live, other=0).to(tl.int32)
        product = tl.load(s2 + code) * tl.load(s1 + index // 256, mask=live, other=0.0)
        return product + tl.load(s3)
    elif SCALES == _E8M0:
        return e8m0_value(tl.load(s0 + index, mask=live, other=0).to(tl.int32))
    elif SCALES == _E4M3:
        return e4m3_value(tl.load(s0 + index, mask=live, other=0).to(tl.int32)) * tl.load(s1)
    else:
        value = e4m3_value(tl.load(s0 + index, mask=live, other=0).to(tl.int32))
        return tl.div_rn(value, tl.load(s1) + tl.zeros_like(value))


def scale_arguments(
    scales: Sequence[Tensor], spec: QuantSpec, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four pointers of `block_scale`; those a layout does not read repeat the first."""
    first = scales[0]
    if spec.scales == "log8":
        return first, scales[1], tables.log8(device), first
    if spec.scales == "nested":
        return first, scales[1], scales[2], scales[3]
    return first, scales[1] if len(scales) > 1 else first, first, first
