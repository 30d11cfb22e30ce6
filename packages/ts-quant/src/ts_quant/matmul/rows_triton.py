# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton kernels around FP8 products: activations to FP8, and blocks of 32 to row scales."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ts_quant.codecs.launch import on_device_of

_STEP = 4096
_SMALLEST_SCALE = tl.constexpr(2.0**-100)


@triton.jit
def _scale(amax):
    return tl.maximum(tl.div_rn(amax, tl.zeros_like(amax) + 448.0), _SMALLEST_SCALE)


@triton.jit
def _part(x_ptr, factor_ptr, column, K, SCALED: tl.constexpr):
    x = tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32)
    if SCALED:
        x *= tl.load(factor_ptr + column, mask=column < K, other=0.0)
    return x


@triton.jit
def _rows(
    x_ptr,  # [M, K], rows x_stride apart
    factor_ptr,  # fp32 [K]; with SCALED only
    codes_ptr,  # uint8 (e4m3) [M, K]
    scale_ptr,  # fp32 [M]
    K,
    x_stride,
    SCALED: tl.constexpr,  # whether columns are multiplied by their factors first
    STEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    index = tl.arange(0, STEP)
    largest = tl.zeros([STEP], dtype=tl.float32)
    for start in range(0, K, STEP):
        column = start + index
        x = _part(x_ptr, factor_ptr, column, K, SCALED)
        largest = tl.maximum(largest, tl.abs(x))
    amax = tl.max(largest, axis=0)
    scale = _scale(amax)
    inverse = tl.div_rn(1.0, scale)
    for start in range(0, K, STEP):
        column = start + index
        x = _part(x_ptr, factor_ptr, column, K, SCALED)
        unit = x * inverse
        unit = tl.clamp(unit, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(
            codes_ptr + row * K + column,
            unit.to(tl.float8e4nv).to(tl.uint8, bitcast=True),
            mask=column < K,
        )
    tl.store(scale_ptr + row, scale)


@triton.jit
def _groups(
    x_ptr,  # [M, K], rows x_stride apart
    codes_ptr,  # uint8 (e4m3) [M, K]
    scale_ptr,  # fp32 [K / 128, M]
    M,
    K,
    x_stride,
    GROUPS: tl.constexpr,  # groups of 128 columns per program
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    live = column < K
    x = tl.load(x_ptr + row * x_stride + column, mask=live, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x), axis=1)
    scale = _scale(amax)
    unit = x * tl.div_rn(tl.full([GROUPS], 1.0, tl.float32), scale)[:, None]
    unit = tl.clamp(unit, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(
        codes_ptr + row * K + column, unit.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=live
    )
    tl.store(scale_ptr + group.to(tl.int64) * M + row, scale, mask=group * 128 < K)


@triton.jit
def _blocks_to_rows(
    codes_ptr,  # uint8 (e4m3) [N, K]
    byte_ptr,  # uint8 (e8m0) [N, K / 32]
    out_ptr,  # e4m3 [N, K]
    scale_ptr,  # fp32 [N]
    K,
    BLOCKS: tl.constexpr,  # blocks of 32 per step
):
    row = tl.program_id(0).to(tl.int64)
    blocks = K // 32
    index = tl.arange(0, BLOCKS)
    largest = tl.zeros([BLOCKS], dtype=tl.int32)
    for start in range(0, blocks, BLOCKS):
        block = start + index
        byte = tl.load(byte_ptr + row * blocks + block, mask=block < blocks, other=0)
        largest = tl.maximum(largest, byte.to(tl.int32))
    top = tl.max(largest, axis=0)
    for start in range(0, blocks, BLOCKS):
        block = start + index
        byte = tl.load(byte_ptr + row * blocks + block, mask=block < blocks, other=0)
        # 2^(byte - top), 0 where it is below every denormal of e4m3 anyway.
        down = tl.maximum(byte.to(tl.int32) - top + 127, 0)
        factor = (down << 23).to(tl.float32, bitcast=True)
        offset = block[:, None] * 32 + tl.arange(0, 32)[None, :]
        live = block[:, None] < blocks
        code = tl.load(codes_ptr + row * K + offset, mask=live, other=0)
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor[:, None]
        tl.store(out_ptr + row * K + offset, value.to(tl.float8e4nv), mask=live)
    bits = tl.where(top == 0, 0x00400000, top << 23)
    bits = tl.where(top == 255, 0x7FC00000, bits)
    tl.store(scale_ptr + row, bits.to(tl.float32, bitcast=True))


def rows(x: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`rows.fp8_rows` on a GPU of sm_89 or later.

    Args:
        x: [M, K].
        factor: fp32 [K], by which columns are multiplied in fp32 first.
    """
    m, k = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty((m, k), dtype=torch.uint8, device=x.device)
    scale = torch.empty((m, 1), dtype=torch.float32, device=x.device)
    if m:
        step = min(triton.next_power_of_2(max(k, 1)), _STEP)
        with on_device_of(x):
            _rows[(m,)](
                x,
                x if factor is None else factor,
                codes,
                scale,
                k,
                x.stride(0),
                SCALED=factor is not None,
                STEP=step,
                num_warps=8 if step > 1024 else 4,
            )
    return codes, scale


def groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """`rows.fp8_groups` on a GPU of sm_89 or later."""
    m, k = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty((m, k), dtype=torch.uint8, device=x.device)
    scale = torch.empty((k // 128, m), dtype=torch.float32, device=x.device)
    if m:
        with on_device_of(x):
            _groups[(m, triton.cdiv(k // 128, 16))](x, codes, scale, m, k, x.stride(0), GROUPS=16)
    return codes, scale


def blocks_to_rows(codes: Tensor, byte: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """`fp8.blocks_to_rows` on a GPU of sm_89 or later."""
    out = torch.empty((n, k), dtype=torch.float8_e4m3fn, device=codes.device)
    scale = torch.empty((1, n), dtype=torch.float32, device=codes.device)
    with on_device_of(codes):
        _blocks_to_rows[(n,)](codes, byte, out, scale, k, BLOCKS=128, num_warps=4)
    return out, scale
