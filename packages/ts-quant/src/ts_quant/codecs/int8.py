"""int8: 8-bit codes in equal steps, one fp32 absmax per block.

    q[i]  = round_half_even(fp32(w[i]) / absmax * 127)      int8 [n], in flattened order
    value = fp32(q[i] / 127) * absmax, then rounded to the output dtype

Dividing the code rather than the scale keeps +-absmax exact, cannot overflow at the largest
fp32 values and loses nothing for denormal scales. A block of zeros is stored as zeros. With
one-byte scales ("log8") absmax is the scale as it decodes, which is never below the true one by
more than rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ts_quant.codecs.base import register
from ts_quant.codecs.blockwise import BlockwiseCodec
from ts_quant.codecs.scales import UnitRange

LEVELS = 127.0
"""The largest code; codes run from -127 to 127."""

UNIT_HIGH = 2.0**-7 + 2.0**-14
UNIT_LOW = 4.805917797057191e-07
"""1/127 in two parts: q * UNIT_HIGH (exact) + q * UNIT_LOW, in fp32, is fp32(q / 127)."""


class Int8Codec(BlockwiseCodec):
    """8.5 bits per weight at the default block size; see the module's docstring."""

    name = "int8"
    error_rank_order = 1
    scale_layouts = ("float32", "log8")
    code_dtype = torch.int8
    codes_per_byte = 1
    unit = UnitRange(1.0, round_up=True)
    triton_module = "ts_quant.codecs.byte_triton"

    def encode_chunk(
        self,
        values: Tensor,
        scales: Tensor,
        codes: Tensor,
        start: int,
        stop: int,
        limit: float | None,
    ) -> None:
        divisor = scales.masked_fill(scales == 0, 1.0)
        steps = values.div_(divisor).mul_(LEVELS).round_().clamp_(-LEVELS, LEVELS)
        codes[start:stop].copy_(steps.view(-1))

    def decode_chunk(self, codes: Tensor, start: int, stop: int) -> Tensor:
        # A tensor divisor: by a number, torch multiplies with the rounded inverse on a GPU.
        levels = torch.full((), LEVELS, dtype=torch.float32, device=codes.device)
        return codes[start:stop].to(torch.float32).div_(levels)


CODEC = register(Int8Codec())
