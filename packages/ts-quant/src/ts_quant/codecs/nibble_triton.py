# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Decode of 4-bit codes in Triton: NF4, NVFP4 and MXFP4.

    value = fp32(code[q]) * scale, rounded once to the output dtype

Two kernels. `_decode_words` takes whole 32-bit words of eight codes: a program reads a run of
words (16 bytes a thread), loads each block's scale once, and stores eight values (16 bytes in
bf16) a thread side by side. It needs a power-of-two block size of at least 8, eight divides n, and
4-byte aligned codes. `_decode_values` takes everything else, one value at a time.
(`shuffle_triton` is a faster kernel for the commonest case.)

How an NF4 code becomes a value is a compile-time choice (`LOOKUP`):
    "select"  a tree of 15 selects in registers
    "gather"  tl.gather from a 16-value tensor, built in registers and kept in shared memory
    "load"    a read of a 64-byte table through the L1 cache
e2m1 codes are moved to fp32's exponent and mantissa ("bits").
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
from ts_quant.codecs.launch import MOST_BLOCK, is_power_of_two, on_device_of
from ts_quant.codecs.nf4 import CODEBOOK
from ts_quant.codecs.scales_triton import LAYOUT_IDS, block_scale, scale_arguments

LOOKUPS = {"select": 0, "gather": 1, "load": 2}
_SELECT = tl.constexpr(0)
_GATHER = tl.constexpr(1)
_LOAD = tl.constexpr(2)
_BITS = tl.constexpr(3)
_TWO_126 = tl.constexpr(2.0**126)

VALUES_PER_WORD = 8
_TAIL_VALUES = 1024


@dataclass(frozen=True)
class DecodeConfig:
    """Compile-time choices of `_decode_words`; `benchmarks/decode.py` compares them.

    Attributes:
        lookup: a key of `LOOKUPS`; NF4 only.
        words: 32-bit words (eight values each) per program, a power of two.
        num_warps: warps per program.
    """

    lookup: str = "gather"
    words: int = 128
    num_warps: int = 1


DEFAULT_CONFIG = DecodeConfig()


@triton.jit
def select_value(code):
    """The NF4 codebook as selects on the code's bits; values are those of `nf4.CODEBOOK`."""
    b0 = (code & 1) != 0
    b1 = (code & 2) != 0
    b2 = (code & 4) != 0
    b3 = (code & 8) != 0
    v0 = tl.where(b0, -0.6961928009986877, -1.0)
    v1 = tl.where(b0, -0.39491748809814453, -0.5250730514526367)
    v2 = tl.where(b0, -0.18477343022823334, -0.28444138169288635)
    v3 = tl.where(b0, 0.0, -0.09105003625154495)
    v4 = tl.where(b0, 0.16093020141124725, 0.07958029955625534)
    v5 = tl.where(b0, 0.33791524171829224, 0.24611230194568634)
    v6 = tl.where(b0, 0.5626170039176941, 0.44070982933044434)
    v7 = tl.where(b0, 1.0, 0.7229568362236023)
    negative = tl.where(b2, tl.where(b1, v3, v2), tl.where(b1, v1, v0))
    positive = tl.where(b2, tl.where(b1, v7, v6), tl.where(b1, v5, v4))
    return tl.where(b3, positive, negative)


@triton.jit
def e2m1_value(code):
    """fp32 values of e2m1 codes (int32 0..15), by bits.

    Exponent and mantissa moved to fp32's place are the value times 2^-126, 0.5 included.
    """
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * _TWO_126


@triton.jit
def _decode_words(
    words_ptr,  # int32 [n / 8]: byte k holds values 2k and 2k + 1 of the eight
    s0,  # scales, as in `scales_triton.block_scale`
    s1,
    s2,
    s3,
    table_ptr,  # fp32 [16]; read only by LOOKUP "load"
    out_ptr,  # [n], the output dtype
    n_words,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # quantization blocks per program
    SCALES: tl.constexpr,
    LOOKUP: tl.constexpr,
):
    WORDS: tl.constexpr = BLOCK // 8
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    first_word = first_block * WORDS
    word_index = tl.arange(0, BLOCKS * WORDS)
    left = n_words - first_word  # words from this program's first one to the end
    word = tl.load(words_ptr + first_word + word_index, mask=word_index < left, other=0)
    block = tl.arange(0, BLOCKS)
    scale = block_scale(s0, s1, s2, s3, first_block + block, block * WORDS < left, SCALES)

    # [BLOCKS, WORDS, 8]: of NF4 the high nibble of a byte comes first, of e2m1 the low one.
    position = tl.arange(0, 8)[None, None, :]
    if LOOKUP == _BITS:
        shift = position * 4
    else:
        shift = (position ^ 1) * 4
    code = (tl.reshape(word, [BLOCKS, WORDS])[:, :, None] >> shift) & 15
    if LOOKUP == _SELECT:
        value = select_value(code)
    elif LOOKUP == _GATHER:
        table = select_value(tl.arange(0, 16))
        flat = tl.gather(table, tl.reshape(code, [BLOCKS * WORDS * 8]), 0)
        value = tl.reshape(flat, [BLOCKS, WORDS, 8])
    elif LOOKUP == _LOAD:
        value = tl.load(table_ptr + code)
    else:
        value = e2m1_value(code)
    value = value * scale[:, None, None]

    word_offset = tl.arange(0, BLOCKS)[:, None, None] * WORDS + tl.arange(0, WORDS)[None, :, None]
    tl.store(
        out_ptr + first_word * 8 + (word_offset * 8 + position),
        value.to(out_ptr.dtype.element_ty),
        mask=word_offset < left,
    )


@triton.jit
def _decode_values(
    codes_ptr,  # uint8 [ceil(n / 2)]
    s0,
    s1,
    s2,
    s3,
    out_ptr,  # [n], the output dtype
    n,
    BLOCK: tl.constexpr,
    VALUES: tl.constexpr,  # values per program
    SCALES: tl.constexpr,
    E2M1: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    live = index < n
    byte = tl.load(codes_ptr + index // 2, mask=live, other=0).to(tl.int32)
    if E2M1:
        value = e2m1_value(tl.where(index % 2 == 0, byte & 15, byte >> 4))
    else:
        value = select_value(tl.where(index % 2 == 0, byte >> 4, byte & 15))
    value = value * block_scale(s0, s1, s2, s3, index // BLOCK, live, SCALES)
    tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask=live)


@cache
def _table(device: torch.device) -> Tensor:
    return torch.tensor(CODEBOOK, dtype=torch.float32, device=device)


def takes_words(codes: Tensor, n_values: int, block_size: int) -> bool:
    """Whether words can be decoded: eight codes at a time, whole blocks per program."""
    return (
        n_values % VALUES_PER_WORD == 0
        and VALUES_PER_WORD <= block_size <= MOST_BLOCK
        and is_power_of_two(block_size)
        and codes.data_ptr() % 4 == 0
        and codes.storage_offset() % 4 == 0
    )


def decode_out(
    buffers: Sequence[Tensor],
    spec: QuantSpec,
    out: Tensor,
    config: DecodeConfig = DEFAULT_CONFIG,
) -> None:
    """Decode into `out` on the current stream, allocating nothing.

    Args:
        buffers: the codec's, contiguous.
        spec: of codec "nf4", "nvfp4" or "mxfp4".
        out: contiguous, bf16, fp16 or fp32.
        config: compile-time choices of the fast kernel.
    """
    codes, *scales = buffers
    n, block_size = out.numel(), spec.block_size
    if n == 0:
        return
    arguments = scale_arguments(scales, spec, out.device)
    layout = LAYOUT_IDS[spec.scales]
    with on_device_of(out):
        if not takes_words(codes, n, block_size):
            _decode_values[(triton.cdiv(n, _TAIL_VALUES),)](
                codes,
                *arguments,
                out,
                n,
                BLOCK=block_size,
                VALUES=_TAIL_VALUES,
                SCALES=layout,
                E2M1=spec.codec != "nf4",
                enable_fp_fusion=False,
            )
            return
        blocks = max(config.words * VALUES_PER_WORD // block_size, 1)
        n_words = n // VALUES_PER_WORD
        table = _table(out.device) if config.lookup == "load" else scales[0]
        _decode_words[(triton.cdiv(n_words, blocks * (block_size // VALUES_PER_WORD)),)](
            codes.view(-1).view(torch.int32),
            *arguments,
            table,
            out,
            n_words,
            BLOCK=block_size,
            BLOCKS=blocks,
            SCALES=layout,
            LOOKUP=LOOKUPS[config.lookup] if spec.codec == "nf4" else 3,
            num_warps=config.num_warps,
            enable_fp_fusion=False,
        )
