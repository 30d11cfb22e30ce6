# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Decode of whole words of 4-bit codes to bf16 or fp16 through the warp's shuffle unit.

    value = fp32(code[q]) * scale, rounded once

Lane l of a warp keeps code[l % 16] in a register, and `shfl.sync.idx` with the shifted word as
lane number fetches a value: it reads only the five lowest bits, the lowest four of which are the
code, so a lookup costs one shift and one shuffle. A thread takes one word (eight codes), stores 16
bytes, and neighbouring threads store side by side; `UNROLL` words per thread, a program's width
apart, keep more loads in flight.

3.74 TB/s for NF4 to bf16 on an H200 (`benchmarks/nf4_sweep.py`). Inline PTX, so the kernel has no
meaning under Triton's interpreter; `nibble_triton` decodes everything it does not take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ts_quant.codecs import nibble_triton
from ts_quant.codecs.base import QuantSpec
from ts_quant.codecs.launch import is_power_of_two, on_device_of
from ts_quant.codecs.nibble_triton import e2m1_value, select_value
from ts_quant.codecs.scales_triton import LAYOUT_IDS, block_scale, scale_arguments


@dataclass(frozen=True)
class ShuffleConfig:
    """Compile-time choices of `_decode_shuffled`; `benchmarks/nf4_sweep.py` compares them.

    Attributes:
        num_warps: warps per program.
        unroll: words per thread: 1, 2 or 4.
        store: cache modifier of the stores, "" or ".cs" (written once, not read again soon).
        per_thread: words side by side in a thread.
    """

    num_warps: int = 4
    unroll: int = 2
    store: str = ""
    per_thread: int = 1


DEFAULT_CONFIG = ShuffleConfig()
MXFP4_CONFIG = ShuffleConfig(unroll=4)

_LANE = tl.constexpr("mov.u32 $0, %laneid;")


def _word_asm(convert: str, high_first: bool) -> str:
    """PTX for one word: pairs of values to $0..$3, from word $4, the lane's value $5, scale $6."""
    lines = ["{", ".reg .b32 s, t;", ".reg .f32 a, b, c;", "mov.b32 c, $6;"]
    for pair in range(4):
        bits = (8 * pair + 4, 8 * pair) if high_first else (8 * pair, 8 * pair + 4)
        for register, bit in zip("ab", bits, strict=True):
            lines += [
                f"shr.u32 s, $4, {bit};",
                "shfl.sync.idx.b32 t, $5, s, 0x1f, 0xffffffff;",
                f"mov.b32 {register}, t;",
                f"mul.rn.f32 {register}, {register}, c;",
            ]
        lines.append(f"{convert} ${pair}, b, a;")
    return "\n".join([*lines, "}"])


_NF4_BF16 = tl.constexpr(_word_asm("cvt.rn.bf16x2.f32", high_first=True))
_NF4_FP16 = tl.constexpr(_word_asm("cvt.rn.f16x2.f32", high_first=True))
_E2M1_BF16 = tl.constexpr(_word_asm("cvt.rn.bf16x2.f32", high_first=False))
_E2M1_FP16 = tl.constexpr(_word_asm("cvt.rn.f16x2.f32", high_first=False))


@triton.jit
def _decoded(word, table, scale, E2M1: tl.constexpr, HALF: tl.constexpr):
    """[words * 4] int32, each two values, of [words] int32 and fp32 scales."""
    NF4: tl.constexpr = _NF4_FP16 if HALF else _NF4_BF16
    FLOAT4: tl.constexpr = _E2M1_FP16 if HALF else _E2M1_BF16
    p0, p1, p2, p3 = tl.inline_asm_elementwise(
        FLOAT4 if E2M1 else NF4,
        "=r,=r,=r,=r,r,r,r",
        [word, table, scale.to(tl.int32, bitcast=True)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )
    pairs = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    return tl.reshape(pairs, [word.shape[0] * 4])


@triton.jit
def _store(pairs_ptr, first, pairs, n_words, CS: tl.constexpr):
    index = first * 4 + tl.arange(0, pairs.shape[0])
    if CS:
        tl.store(pairs_ptr + index, pairs, mask=index < n_words * 4, cache_modifier=".cs")
    else:
        tl.store(pairs_ptr + index, pairs, mask=index < n_words * 4)


@triton.jit
def _decode_shuffled(
    words_ptr,  # int32 [n / 8]
    s0,  # scales, as in `scales_triton.block_scale`
    s1,
    s2,
    s3,
    pairs_ptr,  # int32 [n / 2]: the output, two values at a time
    n_words,
    BLOCK_WORDS: tl.constexpr,  # words per quantization block
    WORDS: tl.constexpr,  # words per step; a multiple of 32 * num_warps
    UNROLL: tl.constexpr,
    SCALES: tl.constexpr,
    E2M1: tl.constexpr,
    HALF: tl.constexpr,
    CS: tl.constexpr,
):
    index = tl.arange(0, WORDS)
    lane = tl.inline_asm_elementwise(_LANE, "=r,r", [index], dtype=tl.int32, is_pure=True, pack=1)
    if E2M1:
        table = e2m1_value(lane & 15).to(tl.int32, bitcast=True)
    else:
        table = select_value(lane & 15).to(tl.int32, bitcast=True)
    first = tl.program_id(0).to(tl.int64) * (WORDS * UNROLL)
    w0 = first + index
    word0 = tl.load(words_ptr + w0, mask=w0 < n_words, other=0)
    scale0 = block_scale(s0, s1, s2, s3, w0 // BLOCK_WORDS, w0 < n_words, SCALES)
    if UNROLL >= 2:
        w1 = w0 + WORDS
        word1 = tl.load(words_ptr + w1, mask=w1 < n_words, other=0)
        scale1 = block_scale(s0, s1, s2, s3, w1 // BLOCK_WORDS, w1 < n_words, SCALES)
    if UNROLL >= 4:
        w2 = w0 + 2 * WORDS
        word2 = tl.load(words_ptr + w2, mask=w2 < n_words, other=0)
        scale2 = block_scale(s0, s1, s2, s3, w2 // BLOCK_WORDS, w2 < n_words, SCALES)
        w3 = w0 + 3 * WORDS
        word3 = tl.load(words_ptr + w3, mask=w3 < n_words, other=0)
        scale3 = block_scale(s0, s1, s2, s3, w3 // BLOCK_WORDS, w3 < n_words, SCALES)
    _store(pairs_ptr, first, _decoded(word0, table, scale0, E2M1, HALF), n_words, CS)
    if UNROLL >= 2:
        second = first + WORDS
        _store(pairs_ptr, second, _decoded(word1, table, scale1, E2M1, HALF), n_words, CS)
    if UNROLL >= 4:
        third = first + 2 * WORDS
        _store(pairs_ptr, third, _decoded(word2, table, scale2, E2M1, HALF), n_words, CS)
        fourth = first + 3 * WORDS
        _store(pairs_ptr, fourth, _decoded(word3, table, scale3, E2M1, HALF), n_words, CS)


def takes(codes: Tensor, out: Tensor, block_size: int) -> bool:
    """Whether this kernel applies: 2-byte outputs, whole words, nothing across two blocks."""
    return (
        out.numel() % 8 == 0
        and block_size >= 8
        and is_power_of_two(block_size)
        and codes.data_ptr() % 4 == 0
        and out.data_ptr() % 4 == 0
        and out.element_size() == 2
    )


def decode_out(
    buffers: Sequence[Tensor],
    spec: QuantSpec,
    out: Tensor,
    config: ShuffleConfig | None = None,
) -> None:
    """Decode into `out` on the current stream, allocating nothing.

    What the fast kernel does not take goes to `nibble_triton`.

    Args:
        buffers: the codec's, contiguous.
        spec: of codec "nf4", "nvfp4" or "mxfp4".
        out: contiguous, bf16, fp16 or fp32.
        config: compile-time choices; None: the fastest found on an H200.
    """
    codes, *scales = buffers
    if out.numel() == 0 or not takes(codes, out, spec.block_size):
        nibble_triton.decode_out(buffers, spec, out)
        return
    config = config or (MXFP4_CONFIG if spec.scales == "e8m0" else DEFAULT_CONFIG)
    n_words = out.numel() // 8
    words = 32 * config.num_warps * config.per_thread
    with on_device_of(out):
        _decode_shuffled[(triton.cdiv(n_words, words * config.unroll),)](
            triton.reinterpret(codes, tl.int32),
            *scale_arguments(scales, spec, out.device),
            triton.reinterpret(out, tl.int32),
            n_words,
            BLOCK_WORDS=spec.block_size // 8,
            WORDS=words,
            UNROLL=config.unroll,
            SCALES=LAYOUT_IDS[spec.scales],
            E2M1=spec.codec != "nf4",
            HALF=out.dtype is torch.float16,
            CS=config.store == ".cs",
            num_warps=config.num_warps,
            enable_fp_fusion=False,
        )
