"""The two 4-bit floating-point formats, NVFP4 and MXFP4: e2m1 codes, two per byte.

    q[i]  = nearest e2m1 code of fp32(w[i]) / scale, ties to the even code
    bytes = q[2j] | (q[2j + 1] << 4)             uint8 [ceil(n / 2)]
    value = fp32(e2m1[q[i]] * scale), then rounded to the output dtype

The low nibble comes first, the opposite of NF4. Codes 0 to 7 stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6;
bit 3 is the sign, set for every value below zero (so a small negative value becomes -0). Beyond 6
a value takes the code of 6; where a code would decode to infinity in the weight's dtype, the value
takes the code below.

NVFP4 (scale layouts "e4m3" and "e4m3_div"): blocks of 16; scale = fp32(e4m3 * global) with
global = amax / (6 * 448) and e4m3 = nearest of absmax / (6 * global), from 2^-9 to 448. Codes and
scales are those of ModelOpt.
MXFP4 (layout "e8m0", OCP MX v1.0): blocks of 32; scale = the smallest power of two for which
absmax / scale is at most 6.

Weights whose rows are whole blocks have the layout of these formats' checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ts_quant.codecs import tables
from ts_quant.codecs.base import register
from ts_quant.codecs.blockwise import BlockwiseCodec
from ts_quant.codecs.lookup import pair_values
from ts_quant.codecs.scales import UnitRange

_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


def e2m1_codes(x: Tensor) -> Tensor:
    """Codes (uint8) of fp32 values in units of their scale; x is overwritten."""
    sign = (x < 0).to(torch.uint8)
    magnitude = x.abs_()
    code = sign.bitwise_left_shift_(3)
    for threshold in _TIES_DOWN:
        code += magnitude > threshold
    for threshold in _TIES_UP:
        code += magnitude >= threshold
    return code


class Fp4Codec(BlockwiseCodec):
    """What NVFP4 and MXFP4 share."""

    code_dtype = torch.uint8
    codes_per_byte = 2
    unit = UnitRange(6.0, round_up=False)
    rounds_up = True
    triton_module = "ts_quant.codecs.shuffle_triton"

    def encode_chunk(
        self,
        values: Tensor,
        scales: Tensor,
        codes: Tensor,
        start: int,
        stop: int,
        limit: float | None,
    ) -> None:
        q = e2m1_codes(values.div_(scales))
        if limit is not None:
            units = torch.index_select(
                tables.e2m1(q.device), 0, q.view(-1).bitwise_and(7).to(torch.int32)
            )
            over = units.view(q.shape).mul_(scales) > limit
            q -= over.to(torch.uint8)
        q = q.view(-1)
        target = codes[start // 2 : (stop + 1) // 2]
        target.copy_(q[0::2])
        target[: q.numel() // 2].bitwise_or_(q[1::2].bitwise_left_shift(4))

    def decode_chunk(self, codes: Tensor, start: int, stop: int) -> Tensor:
        part = codes[start // 2 : (stop + 1) // 2]
        return pair_values(part, tables.e2m1_pairs(codes.device))[: stop - start]


class Nvfp4Codec(Fp4Codec):
    """4.5 bits per weight; see the module's docstring."""

    name = "nvfp4"
    error_rank_order = 4
    scale_layouts = ("e4m3", "e4m3_div")
    fixed_block_size = 16


class Mxfp4Codec(Fp4Codec):
    """4.25 bits per weight; see the module's docstring."""

    name = "mxfp4"
    error_rank_order = 5
    scale_layouts = ("e8m0",)
    fixed_block_size = 32


NVFP4 = register(Nvfp4Codec())
MXFP4 = register(Mxfp4Codec())
