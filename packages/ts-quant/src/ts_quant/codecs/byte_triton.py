# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Decode of one-byte codes in Triton: int8 and fp8.

    int8   value = fp32(q / 127) * scale, rounded once to the output dtype
    fp8    value = e4m3(q) * scale, likewise

q / 127 is computed without a division: 1/127 = 2^-7 + 2^-14 + 2^-21 + ..., and

    q * (2^-7 + 2^-14) + q * fp32(1/127 - 2^-7 - 2^-14)

has an exact first term and rounds to fp32(q / 127) for each of the 255 codes, with or without a
fused multiply-add (tests/codecs/test_int8.py goes through all of them).

`_decode_blocks` and `_decode_values` serve scales of flattened blocks, whose size is a power of two
(up to 4096) or any; `_decode_tiles` serves fp8's layout "tile".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ts_quant.codecs.base import QuantSpec
from ts_quant.codecs.fp8 import matrices
from ts_quant.codecs.int8 import UNIT_HIGH, UNIT_LOW
from ts_quant.codecs.launch import MOST_BLOCK, is_power_of_two, on_device_of
from ts_quant.codecs.scales_triton import LAYOUT_IDS, block_scale, e4m3_value, scale_arguments

_HIGH = tl.constexpr(UNIT_HIGH)
_LOW = tl.constexpr(UNIT_LOW)

_TAIL_VALUES = 1024
_TILE_COLUMNS = 1024
_TILE_ROWS = 4


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
def _unit(code, FLOAT: tl.constexpr, NATIVE: tl.constexpr):
    """What a code stands for before it is scaled, in fp32."""
    if FLOAT:
        if NATIVE:
            return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            return e4m3_value(code.to(tl.int32))
    else:
        q = code.to(tl.float32)
        return q * _HIGH + q * _LOW


@triton.jit
def _decode_blocks(
    codes_ptr,  # int8 (uint8 if FLOAT) [n]
    s0,  # scales, as in `scales_triton.block_scale`
    s1,
    s2,
    s3,
    out_ptr,  # [n], the output dtype
    n,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # quantization blocks per program
    SCALES: tl.constexpr,
    FLOAT: tl.constexpr,
    NATIVE: tl.constexpr,  # whether the GPU converts e4m3 (sm_89 and later)
):
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    first = first_block * BLOCK
    left = n - first  # values from this program's first one to the end
    index = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = index < left
    code = tl.load(codes_ptr + first + index, mask=live, other=0)
    block = tl.arange(0, BLOCKS)
    scale = block_scale(s0, s1, s2, s3, first_block + block, block * BLOCK < left, SCALES)
    value = _unit(code, FLOAT, NATIVE) * scale[:, None]
    tl.store(out_ptr + first + index, value.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _decode_values(
    codes_ptr,  # int8 (uint8 if FLOAT) [n]
    s0,
    s1,
    s2,
    s3,
    out_ptr,  # [n], the output dtype
    n,
    BLOCK: tl.constexpr,
    VALUES: tl.constexpr,  # values per program
    SCALES: tl.constexpr,
    FLOAT: tl.constexpr,
    NATIVE: tl.constexpr,  # whether the GPU converts e4m3 (sm_89 and later)
):
    index = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    live = index < n
    code = tl.load(codes_ptr + index, mask=live, other=0)
    scale = block_scale(s0, s1, s2, s3, index // BLOCK, live, SCALES)
    value = _unit(code, FLOAT, NATIVE) * scale
    tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _decode_tiles(
    codes_ptr,  # uint8 [leading * rows, columns]
    scale_ptr,  # fp32 [leading, ceil(rows / height), ceil(columns / width)]
    out_ptr,  # [leading * rows, columns], the output dtype
    all_rows,  # leading * rows
    n_rows,
    n_columns,
    height,  # rows and columns per scale
    width,
    GROUPS: tl.constexpr,  # a program takes ROWS rows of GROUPS * GROUP columns;
    GROUP: tl.constexpr,  # GROUP consecutive columns, from a multiple of GROUP, share a scale
    ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    tile_row = (row // n_rows) * tl.cdiv(n_rows, height) + (row % n_rows) // height
    tile = (tile_row * tl.cdiv(n_columns, width))[:, None] + ((group * GROUP) // width)[None, :]
    some = (row < all_rows)[:, None] & (group * GROUP < n_columns)[None, :]
    scale = tl.load(scale_ptr + tile, mask=some, other=0.0)
    column = (group * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    live = (row < all_rows)[:, None, None] & (column < n_columns)[None, :, :]
    place = (row * n_columns)[:, None, None] + column[None, :, :]
    code = tl.load(codes_ptr + place, mask=live, other=0)
    value = _unit(code, True, NATIVE) * scale[:, :, None]
    tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=live)


@cache
def converts_e4m3(device: torch.device) -> bool:
    """Whether the device has instructions that convert e4m3 (sm_89 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def decode_out(
    buffers: Sequence[Tensor],
    spec: QuantSpec,
    out: Tensor,
    config: DecodeConfig = DEFAULT_CONFIG,
) -> None:
    """Decode into `out` on the current stream, allocating nothing.

    Args:
        buffers: the codec's, contiguous.
        spec: of codec "int8" or "fp8".
        out: contiguous, bf16, fp16 or fp32.
        config: compile-time choices of the fast kernel.
    """
    n = out.numel()
    if n == 0:
        return
    with on_device_of(out):
        if spec.scales == "tile":
            _launch_tiles(buffers, spec, out)
            return
        codes, *scales = buffers
        arguments = scale_arguments(scales, spec, out.device)
        block_size, native = spec.block_size, converts_e4m3(out.device)
        if not is_power_of_two(block_size) or block_size > MOST_BLOCK:
            _decode_values[(triton.cdiv(n, _TAIL_VALUES),)](
                codes,
                *arguments,
                out,
                n,
                BLOCK=block_size,
                VALUES=_TAIL_VALUES,
                SCALES=LAYOUT_IDS[spec.scales],
                FLOAT=spec.codec == "fp8",
                NATIVE=native,
                enable_fp_fusion=False,
            )
            return
        blocks = max(config.values // block_size, 1)
        _decode_blocks[(triton.cdiv(n, blocks * block_size),)](
            codes,
            *arguments,
            out,
            n,
            BLOCK=block_size,
            BLOCKS=blocks,
            SCALES=LAYOUT_IDS[spec.scales],
            FLOAT=spec.codec == "fp8",
            NATIVE=native,
            num_warps=config.num_warps,
            enable_fp_fusion=False,
        )


def _launch_tiles(buffers: Sequence[Tensor], spec: QuantSpec, out: Tensor) -> None:
    codes, scale = buffers
    leading, n_rows, n_columns = matrices(out.shape)
    width, all_rows = spec.block_size, leading * n_rows
    # The most columns, a power of two, that never straddle two tiles.
    group = _TILE_COLUMNS if width >= n_columns else min(width & -width, _TILE_COLUMNS)
    grid = triton.cdiv(all_rows, _TILE_ROWS), triton.cdiv(n_columns, _TILE_COLUMNS)
    _decode_tiles[grid](
        codes,
        scale,
        out,
        all_rows,
        n_rows,
        n_columns,
        spec.rows,
        width,
        GROUPS=_TILE_COLUMNS // group,
        GROUP=group,
        ROWS=_TILE_ROWS,
        NATIVE=converts_e4m3(out.device),
        num_warps=8,
        enable_fp_fusion=False,
    )
