"""The Triton kernels under Triton's interpreter; run by test_triton_interpreter.py.

TRITON_INTERPRET=1 must be set before triton is imported, hence a process of its own. The
interpreter truncates where a GPU rounds fp32 to bf16, so bf16 is compared within one unit in the
last place, fp32 and fp16 exactly.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import ts_quant
from ts_quant.codecs import int8_triton, nf4_triton

assert os.environ.get("TRITON_INTERPRET") == "1"

SIZES = [1, 8, 63, 65, 96, 331, 520]
BLOCK_SIZES = [2, 8, 62, 64, 256]
DTYPES = [torch.float32, torch.bfloat16]
NF4_CONFIGS = [
    nf4_triton.DecodeConfig(lookup, words) for lookup in nf4_triton.LOOKUPS for words in (16, 128)
]
INT8_CONFIGS = [int8_triton.DecodeConfig(values) for values in (128, 1024)]


def assert_decodes(module: Any, codec: str, w: Tensor, block_size: int, config: Any) -> None:
    q = ts_quant.quantize(w, codec, block_size)
    for dtype in DTYPES:
        expected = q.dequantize(dtype)
        # Room behind the output must stay as it was: masks hold.
        room = torch.full((w.numel() + 64,), float("nan"), dtype=dtype)
        out = room[: w.numel()]
        module.decode_out(q.buffers(), q.spec, out, config)
        assert bool(room[w.numel() :].isnan().all())
        if dtype is torch.bfloat16:
            ulps = out.view(torch.int16).int() - expected.view(torch.int16).int()
            assert int(ulps.abs().max()) <= 1
        else:
            assert torch.equal(out, expected)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("config", NF4_CONFIGS, ids=str)
def test_nf4(config: nf4_triton.DecodeConfig, block_size: int) -> None:
    for n in SIZES:
        assert_decodes(nf4_triton, "nf4", torch.randn(n), block_size, config)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("config", INT8_CONFIGS, ids=str)
def test_int8(config: int8_triton.DecodeConfig, block_size: int) -> None:
    for n in SIZES:
        assert_decodes(int8_triton, "int8", torch.randn(n), block_size, config)


@pytest.mark.parametrize("codec", ["nf4", "int8"])
def test_many_programs_and_fp16(codec: str) -> None:
    module = {"nf4": nf4_triton, "int8": int8_triton}[codec]
    q = ts_quant.quantize(torch.randn(3, 3011, 4), codec)
    for dtype in (torch.float16, torch.float32):
        out = torch.empty(3, 3011, 4, dtype=dtype)
        module.decode_out(q.buffers(), q.spec, out)
        assert torch.equal(out, q.dequantize(dtype))


def test_every_nf4_code_and_every_int8_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(-1, 1)
    q = ts_quant.quantize(torch.ones(512), "nf4").with_buffers((codes, torch.full((8,), 3.7)))
    for config in NF4_CONFIGS:
        out = torch.empty(512)
        nf4_triton.decode_out(q.buffers(), q.spec, out, config)
        assert torch.equal(out, q.dequantize())
    signed = torch.arange(-127, 129).clamp_(max=127).to(torch.int8)
    q = ts_quant.quantize(torch.ones(256), "int8").with_buffers((signed, torch.full((4,), 3.7)))
    out = torch.empty(256)
    int8_triton.decode_out(q.buffers(), q.spec, out)
    assert torch.equal(out, q.dequantize())


@pytest.mark.parametrize("codec", ["nf4", "int8"])
def test_extreme_scales(codec: str) -> None:
    module = {"nf4": nf4_triton, "int8": int8_triton}[codec]
    for scale in (torch.finfo(torch.float32).max, 2.0**-126, 2.0**-149, 0.0):
        w = torch.linspace(-1, 1, 128) * scale
        q = ts_quant.quantize(w, codec)
        out = torch.empty(128)
        module.decode_out(q.buffers(), q.spec, out)
        assert torch.equal(out, q.dequantize()) and bool(out.isfinite().all())


@pytest.mark.parametrize("codec", ["nf4", "int8"])
def test_empty_and_misaligned(codec: str) -> None:
    module = {"nf4": nf4_triton, "int8": int8_triton}[codec]
    none = ts_quant.quantize(torch.empty(0), codec)
    module.decode_out(none.buffers(), none.spec, torch.empty(0))
    q = ts_quant.quantize(torch.randn(256), codec)
    codes, absmax = q.buffers()
    for offset in (1, 2, 3, 4):  # a slot may put codes at any byte
        room = torch.zeros(codes.numel() + 8, dtype=codes.dtype)
        moved = room[offset : offset + codes.numel()].view(codes.shape)
        moved.copy_(codes)
        out = torch.empty(256)
        module.decode_out((moved, absmax), q.spec, out)
        assert torch.equal(out, q.dequantize())
