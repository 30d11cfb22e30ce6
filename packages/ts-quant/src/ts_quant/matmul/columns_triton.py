# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton kernels that turn a weight's e4m3 codes [N, K] to [K, N], with one scale per column.

This runs for every weight in every backward pass, so a tile is read in full lines along K and
written in full lines along N, and each byte is touched once. Four rows are put into one word before
the tile is turned: what crosses shared memory is words, not bytes.

The largest scale of each column needs all rows first. `_column_tops` reads the bytes of the scales
only, a 32nd of the weight, and leaves its maxima in `_CHUNKS` parts, which each tile puts together
for its own columns. That saves a launch and atomics, which would need memory set to zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ts_quant.codecs.launch import on_device_of

_CHUNKS = 64
_TILE = 128


@triton.jit
def _column_tops(
    byte_ptr,  # uint8 (e8m0) [N, K / 32]
    tops_ptr,  # uint8 [K / 32, CHUNKS]
    N,
    blocks,
    rows_per_chunk,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,  # per step
    COLUMNS: tl.constexpr,
):
    chunk = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = chunk.to(tl.int64) * rows_per_chunk
    largest = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
    for start in range(0, rows_per_chunk, ROWS):
        row = start + tl.arange(0, ROWS)
        live = ((row < rows_per_chunk) & (first + row < N))[:, None] & (column < blocks)[None, :]
        offset = row[:, None] * blocks + column[None, :]
        byte = tl.load(byte_ptr + first * blocks + offset, mask=live, other=0)
        largest = tl.maximum(largest, byte.to(tl.int32))
    top = tl.max(largest, axis=0)
    tl.store(tops_ptr + column * CHUNKS + chunk, top.to(tl.uint8), mask=column < blocks)


@triton.jit
def _part(
    codes_ptr,
    byte_ptr,
    top,
    row,
    live_row,
    part,
    live_part,
    K,
    blocks,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Codes of these rows [rows, parts, WIDTH], in units of their columns' scales."""
    inside = tl.arange(0, WIDTH)
    offset = row[:, None, None] * K + part[None, :, None] * WIDTH + inside[None, None, :]
    live = live_row[:, None] & live_part[None, :]
    if WHOLE:
        code = tl.load(codes_ptr + offset)
    else:
        code = tl.load(codes_ptr + offset, mask=live[:, :, None], other=0)
    if BLOCKS:
        block = row[:, None] * blocks + part[None, :]
        if WHOLE:
            byte = tl.load(byte_ptr + block)
        else:
            byte = tl.load(byte_ptr + block, mask=live, other=0)
        # 2^(byte - top) in fp16, or 0 below 2^-24. A product is exact from 2^-21 on, and e4m3 keeps
        # nothing under 2^-10: fp16 gives the codes of fp32, with half the conversions.
        bits = tl.maximum(byte.to(tl.int32) - top[None, :] + 127, 0) << 23
        factor = tl.where(bits < (103 << 23), 0, bits).to(tl.float32, bitcast=True).to(tl.float16)
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16) * factor[:, :, None]
        code = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return code


@triton.jit
def _turn(
    codes_ptr,  # uint8 (e4m3) [N, K]
    byte_ptr,  # uint8 (e8m0) [N, K / 32]; with BLOCKS only
    tops_ptr,  # uint8 [K / 32, CHUNKS]; with BLOCKS only
    out_ptr,  # int32 [K, N / 4]: four codes each
    scale_ptr,  # fp32 [K]
    N,
    K,
    blocks,  # K / 32, an argument so that its divisors are known
    BLOCKS: tl.constexpr,  # whether the weight is in blocks of 32
    WHOLE: tl.constexpr,  # whether N and K are multiples of the tile
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,  # of 32 (BLOCKS) or 16 columns in a tile
):
    WIDTH: tl.constexpr = TILE // PARTS
    WORDS: tl.constexpr = TILE // 4
    column_tile = tl.program_id(0)
    row_tile = tl.program_id(1)
    first_row = row_tile.to(tl.int64) * TILE
    part = column_tile * PARTS + tl.arange(0, PARTS)
    live_part = part * WIDTH < K
    word = tl.arange(0, WORDS)
    live_word = first_row + word * 4 < N
    bits = tl.full([PARTS], 0x3F800000, tl.int32)  # 1.0
    top = bits
    if BLOCKS:
        chunk = tl.arange(0, CHUNKS)
        tops = tl.load(
            tops_ptr + part[:, None] * CHUNKS + chunk[None, :], mask=live_part[:, None], other=0
        )
        top = tl.max(tops.to(tl.int32), axis=1)
        bits = tl.where(top == 0, 0x00400000, top << 23)
        bits = tl.where(top == 255, 0x7FC00000, bits)
    codes_ptr += first_row * K
    byte_ptr += first_row * blocks
    four = tl.zeros([WORDS, PARTS, WIDTH], tl.int32)
    for each in tl.static_range(4):
        code = _part(
            codes_ptr,
            byte_ptr,
            top,
            word * 4 + each,
            live_word,
            part,
            live_part,
            K,
            blocks,
            BLOCKS,
            WHOLE,
            WIDTH,
        )
        four |= code.to(tl.int32) << (8 * each)
    across = tl.trans(tl.reshape(four, (WORDS, TILE)))
    column = tl.arange(0, TILE)
    first_column = column_tile.to(tl.int64) * TILE
    words = N // 4
    out_ptr += first_column * words + row_tile * WORDS
    to = column[:, None] * words + word[None, :]
    if WHOLE:
        tl.store(out_ptr + to, across)
    else:
        live_column = first_column + column < K
        tl.store(out_ptr + to, across, mask=live_column[:, None] & live_word[None, :])
    if row_tile == 0:
        place = part[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        scale = tl.broadcast_to(bits[:, None], (PARTS, WIDTH)).to(tl.float32, bitcast=True)
        tl.store(scale_ptr + place, scale, mask=live_part[:, None])


def _launch(codes: Tensor, byte: Tensor | None, n: int, k: int) -> tuple[Tensor, Tensor]:
    device = codes.device
    out = torch.empty((k, n), dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty((1, k), dtype=torch.float32, device=device)
    with on_device_of(codes):
        tops = None
        if byte is not None:
            blocks = k // 32
            tops = torch.empty((blocks, _CHUNKS), dtype=torch.uint8, device=device)
            _column_tops[(_CHUNKS, triton.cdiv(blocks, 128))](
                byte,
                tops,
                n,
                blocks,
                triton.cdiv(n, _CHUNKS),
                CHUNKS=_CHUNKS,
                ROWS=32,
                COLUMNS=128,
                num_warps=4,
            )
        _turn[(triton.cdiv(k, _TILE), triton.cdiv(n, _TILE))](
            codes,
            codes if byte is None else byte,
            codes if tops is None else tops,
            out.view(torch.int32),
            scale,
            n,
            k,
            k // 32,
            BLOCKS=byte is not None,
            WHOLE=n % _TILE == 0 and k % _TILE == 0,
            CHUNKS=_CHUNKS,
            TILE=_TILE,
            PARTS=_TILE // (16 if byte is None else 32),
            num_warps=4,
        )
    return out, scale


def blocks_to_columns(codes: Tensor, byte: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """`fp8_backward.blocks_to_columns` on a GPU of sm_89 or later; n a multiple of 4."""
    return _launch(codes, byte, n, k)


def turned(codes: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """`fp8_backward.turned` on a GPU; n a multiple of 4, k of 16."""
    return _launch(codes, None, n, k)
