# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""int8 decode in Triton.

    value = fp32(q / 127) * absmax, rounded once to the output dtype

q / 127 is computed without a division: 1/127 = 2^-7 + 2^-14 + 2^-21 + ..., and

    q * (2^-7 + 2^-14) + q * fp32(1/127 - 2^-7 - 2^-14)

has an exact first term and rounds to fp32(q / 127) for each of the 255 codes, with or without a
fused multiply-add (tests/test_int8.py goes through all of them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ts_quant.codecs.base import QuantSpec
from ts_quant.codecs.int8 import UNIT_HIGH, UNIT_LOW
from ts_quant.codecs.launch import is_power_of_two, on_device_of

_HIGH = tl.constexpr(UNIT_HIGH)
_LOW = tl.constexpr(UNIT_LOW)

_TAIL_VALUES = 1024


@dataclass(frozen=True)
class DecodeConfig:
    """Compile-time choices of `_decode_blocks`; `benchmarks/decode.py` compares them.

    Attributes:
        values: values per program, a power of two.
        num_warps: warps per program.
    """

    values: int = 4096
    num_warps: int = 8


DEFAULT_CONFIG = DecodeConfig()


@triton.jit
def _unit(code):
    """fp32(code / 127) for codes from -127 to 127."""
    q = code.to(tl.float32)
    return q * _HIGH + q * _LOW


@triton.jit
def _decode_blocks(
    codes_ptr,  # int8 [n]
    absmax_ptr,  # fp32 [ceil(n / BLOCK)]
    out_ptr,  # [n], the output dtype
    n,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # quantization blocks per program
):
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    first = first_block * BLOCK
    left = n - first  # values from this program's first one to the end
    index = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = index < left
    code = tl.load(codes_ptr + first + index, mask=live, other=0)
    block_index = tl.arange(0, BLOCKS)
    absmax = tl.load(
        absmax_ptr + first_block + block_index, mask=block_index * BLOCK < left, other=0.0
    )
    value = _unit(code) * absmax[:, None]
    tl.store(out_ptr + first + index, value.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _decode_values(
    codes_ptr,  # int8 [n]
    absmax_ptr,  # fp32 [ceil(n / BLOCK)]
    out_ptr,  # [n], the output dtype
    n,
    BLOCK: tl.constexpr,
    VALUES: tl.constexpr,  # values per program
):
    index = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    live = index < n
    code = tl.load(codes_ptr + index, mask=live, other=0)
    absmax = tl.load(absmax_ptr + index // BLOCK, mask=live, other=0.0)
    value = _unit(code) * absmax
    tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask=live)


def decode_out(
    buffers: Sequence[Tensor],
    spec: QuantSpec,
    out: Tensor,
    config: DecodeConfig = DEFAULT_CONFIG,
) -> None:
    """Decode into `out` on the current stream, allocating nothing.

    Args:
        buffers: the codec's, contiguous.
        spec: layout "float32".
        out: contiguous, n elements, bf16, fp16 or fp32.
        config: compile-time choices of the fast kernel.
    """
    (codes, absmax), block_size = buffers, spec.block_size
    n = out.numel()
    if n == 0:
        return
    with on_device_of(out):
        if not is_power_of_two(block_size):
            grid = (triton.cdiv(n, _TAIL_VALUES),)
            _decode_values[grid](codes, absmax, out, n, BLOCK=block_size, VALUES=_TAIL_VALUES)
            return
        blocks = max(config.values // block_size, 1)
        _decode_blocks[(triton.cdiv(n, blocks * block_size),)](
            codes,
            absmax,
            out,
            n,
            BLOCK=block_size,
            BLOCKS=blocks,
            num_warps=config.num_warps,
        )
