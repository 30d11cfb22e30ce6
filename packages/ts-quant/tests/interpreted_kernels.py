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
from ts_quant.codecs import byte_triton, nibble_triton
from ts_quant.matmul import columns_triton, fp8, fp8_backward, rows, rows_triton

assert os.environ.get("TRITON_INTERPRET") == "1"

MODULES: dict[str, Any] = {
    "nf4": nibble_triton,
    "nvfp4": nibble_triton,
    "mxfp4": nibble_triton,
    "int8": byte_triton,
    "fp8": byte_triton,
}
SIZES = [1, 65, 331, 520]
BLOCK_SIZES = [2, 62, 64, 256]
DTYPES = [torch.float32, torch.bfloat16]
NF4_CONFIGS = [
    nibble_triton.DecodeConfig(lookup, words)
    for lookup in nibble_triton.LOOKUPS
    for words in (16, 128)
]
INT8_CONFIGS = [byte_triton.DecodeConfig(values) for values in (128, 1024)]
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("nf4", {"double_quant": True}),
    ("int8", {"double_quant": True}),
    ("fp8", {}),
    ("fp8", {"layout": "row"}),
    ("fp8", {"layout": "tile"}),
    ("fp8", {"layout": "tensor"}),
    ("nvfp4", {}),
    ("nvfp4", {"layout": "e4m3_div"}),
    ("mxfp4", {}),
]


def assert_decodes(q: ts_quant.QuantTensor, *config: Any) -> None:
    """The kernel gives the reference's values, and nothing else is written."""
    for dtype in DTYPES:
        expected = q.dequantize(dtype)
        room = torch.full((q.numel() + 64,), float("nan"), dtype=dtype)
        out = room[: q.numel()].view(q.shape)
        MODULES[q.codec].decode_out(q.buffers(), q.spec, out, *config)
        assert bool(room[q.numel() :].isnan().all())
        if dtype is torch.bfloat16:
            ulps = out.view(torch.int16).int() - expected.view(torch.int16).int()
            assert int(ulps.abs().max()) <= 1
        else:
            assert torch.equal(out, expected)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("config", NF4_CONFIGS, ids=str)
def test_nf4(config: nibble_triton.DecodeConfig, block_size: int) -> None:
    for n in SIZES:
        assert_decodes(ts_quant.quantize(torch.randn(n), "nf4", block_size), config)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("config", INT8_CONFIGS, ids=str)
def test_int8(config: byte_triton.DecodeConfig, block_size: int) -> None:
    for n in SIZES:
        assert_decodes(ts_quant.quantize(torch.randn(n), "int8", block_size), config)


@pytest.mark.parametrize("codec", ["nf4", "int8"])
def test_blocks_larger_than_a_program(codec: str) -> None:
    for block_size in (8192, 1 << 21, 1 << 40):
        assert_decodes(ts_quant.quantize(torch.randn(3, 4096), codec, block_size))


@pytest.mark.parametrize(("codec", "options"), LAYOUTS, ids=str)
def test_other_layouts(codec: str, options: dict[str, Any]) -> None:
    shapes = [(1,), (63,), (520,), (7, 62), (2, 130, 17), (2, 150)]
    for shape in shapes:
        assert_decodes(ts_quant.quantize(torch.randn(shape), codec, **options))


@pytest.mark.parametrize("codec", ["nf4", "int8"])
def test_one_byte_scales_of_any_block_size(codec: str) -> None:
    for block_size in (2, 8, 62):
        w = torch.randn(1500) * torch.logspace(-6, 3, 1500)
        assert_decodes(ts_quant.quantize(w, codec, block_size, double_quant=True))


@pytest.mark.parametrize("block_size", [62, 64])
def test_nested_scales(block_size: int) -> None:
    n = 64 * 600
    blocks = -(-n // block_size)
    buffers = {
        "codes": torch.randint(0, 256, (n // 2, 1), dtype=torch.uint8),
        "absmax_codes": torch.randint(0, 256, (blocks,), dtype=torch.uint8),
        "nested_absmax": torch.rand(-(-blocks // 256)) * 0.01,
        "nested_map": torch.linspace(-1, 1, 256),
        "nested_offset": torch.tensor(0.0173),
    }
    layout = {"scales": "nested", "block_size": block_size}
    q = ts_quant.QuantTensor.from_buffers(
        "nf4", buffers, shape=(n,), dtype=torch.bfloat16, layout=layout
    )
    assert_decodes(q)


@pytest.mark.parametrize("codec", sorted(MODULES))
def test_many_programs_and_fp16(codec: str) -> None:
    q = ts_quant.quantize(torch.randn(3, 3011, 4), codec)
    for dtype in (torch.float16, torch.float32):
        out = torch.empty(3, 3011, 4, dtype=dtype)
        MODULES[codec].decode_out(q.buffers(), q.spec, out)
        assert torch.equal(out, q.dequantize(dtype))


def all_codes(codec: str, scale: float = 3.7) -> ts_quant.QuantTensor:
    """Every byte as a code once."""
    n = 512 if MODULES[codec] is nibble_triton else 256
    q = ts_quant.quantize(torch.ones(n) * scale, codec)
    codes, *scales = q.buffers()
    every = torch.arange(256, dtype=torch.uint8).view(codes.shape)
    if codec == "int8":
        every = torch.arange(-127, 129).clamp_(max=127).to(torch.int8)
    return q.with_buffers((every, *scales))


@pytest.mark.parametrize("codec", sorted(MODULES))
def test_every_code(codec: str) -> None:
    q = all_codes(codec)
    for config in NF4_CONFIGS if MODULES[codec] is nibble_triton else INT8_CONFIGS:
        out = torch.empty(q.shape)
        MODULES[codec].decode_out(q.buffers(), q.spec, out, config)
        expected = q.dequantize()
        assert torch.equal(out.isnan(), expected.isnan())  # fp8 has two codes of NaN
        signs = torch.equal(out.signbit() | out.isnan(), expected.signbit() | expected.isnan())
        assert signs and torch.equal(out.nan_to_num(1.0), expected.nan_to_num(1.0))


@pytest.mark.parametrize(
    ("codec", "layout"), [("fp8", "e8m0"), ("nvfp4", "e4m3"), ("mxfp4", "e8m0")]
)
def test_every_scale(codec: str, layout: str) -> None:
    block = {"fp8": 32, "nvfp4": 16, "mxfp4": 32}[codec]
    q = ts_quant.quantize(torch.ones(256 * block), codec, layout=layout)
    codes, _, *rest = q.buffers()
    codes.fill_(0x38 if codec == "fp8" else 0x22)  # one
    q = q.with_buffers((codes, torch.arange(256, dtype=torch.uint8), *rest))
    out = torch.empty(q.shape)
    MODULES[codec].decode_out(q.buffers(), q.spec, out)
    expected = q.dequantize()
    assert torch.equal(out.isnan(), expected.isnan()) and bool(expected.isnan().any())
    assert torch.equal(out.nan_to_num(1.0), expected.nan_to_num(1.0))


@pytest.mark.parametrize("codec", sorted(MODULES))
def test_extreme_scales(codec: str) -> None:
    for scale in (torch.finfo(torch.float32).max, 2.0**-126, 2.0**-149, 0.0):
        w = torch.linspace(-1, 1, 128) * scale
        q = ts_quant.quantize(w, codec)
        out = torch.empty(128)
        MODULES[codec].decode_out(q.buffers(), q.spec, out)
        assert torch.equal(out, q.dequantize()) and bool(out.isfinite().all())


@pytest.mark.parametrize("codec", sorted(MODULES))
def test_empty_and_misaligned(codec: str) -> None:
    module = MODULES[codec]
    none = ts_quant.quantize(torch.empty(0), codec)
    module.decode_out(none.buffers(), none.spec, torch.empty(0))
    q = ts_quant.quantize(torch.randn(256), codec)
    codes, *scales = q.buffers()
    for offset in (1, 2, 3, 4):  # a slot may put codes at any byte
        room = torch.zeros(codes.numel() + 8, dtype=codes.dtype)
        moved = room[offset : offset + codes.numel()].view(codes.shape)
        moved.copy_(codes)
        out = torch.empty(256)
        module.decode_out((moved, *scales), q.spec, out)
        assert torch.equal(out, q.dequantize())


def like(mine: Tensor, expected: Tensor) -> bool:
    """Whether e4m3 codes agree as far as the interpreter can tell (Triton 3.7.1).

    Where a GPU rounds fp32 to e4m3 it may be one code off, and it loses the carry of a mantissa
    that rounds up to the next power of two. The GPU tests compare all codes.
    """
    a, b = mine.view(torch.uint8).int(), expected.view(torch.uint8).int()
    carry_lost = (b & 7 == 0) & (b - a == 8)
    return bool((((a - b).abs() <= 1) | carry_lost).all())


@pytest.mark.parametrize("k", [16, 384, 4224])
def test_activations_to_fp8(k: int) -> None:
    x = torch.randn(4, k) * torch.logspace(-3, 3, 4)[:, None]
    x[2] = 0
    for part in (x, x.t().contiguous().t()):
        codes, scale = rows_triton.rows(part)
        expected, expected_scale = rows.rows_reference(x)
        assert torch.equal(scale, expected_scale) and like(codes, expected)
        if k % 128 == 0:
            codes, scale = rows_triton.groups(part)
            expected, expected_scale = rows.groups_reference(x)
            assert torch.equal(scale, expected_scale) and like(codes, expected)


@pytest.mark.parametrize("k", [32, 192, 4128])
def test_blocks_of_32_to_rows(k: int) -> None:
    spread = torch.logspace(-3, 3, 3 * k // 32).view(3, -1).repeat_interleave(32, 1)
    q = ts_quant.quantize(torch.randn(3, k) * spread, "fp8")
    codes, scale = rows_triton.blocks_to_rows(*q.buffers(), 3, k)
    expected, expected_scale = fp8.blocks_to_rows(*q.buffers(), 3, k)
    assert torch.equal(scale, expected_scale) and like(codes, expected)


def test_activations_times_factors_to_fp8() -> None:
    x, factor = torch.randn(4, 4224).bfloat16(), torch.rand(4224) * 1e-3
    found, expected = rows_triton.rows(x, factor), rows_triton.rows(x.float() * factor)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(found[1], rows.rows_reference(x.float() * factor)[1])


# Fewer rows and columns than a tile, whole tiles, a part of one; more rows than one step of each
# chunk of the maxima, and more columns than one program of them.
TURNED = [(16, 32), (144, 160), (256, 384), (2096, 64), (16, 4128)]


@pytest.mark.parametrize(("n", "k"), TURNED)
def test_blocks_of_32_to_columns(n: int, k: int) -> None:
    alike = ts_quant.quantize(torch.randn(n, k).clamp_(0.5, 0.9), "fp8")
    codes, scale = columns_triton.blocks_to_columns(*alike.buffers(), n, k)
    expected, expected_scale = fp8_backward.blocks_to_columns(*alike.buffers(), n, k)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    spread = torch.logspace(-4, 4, n * k // 32).view(n, -1).repeat_interleave(32, 1)
    q = ts_quant.quantize(torch.randn(n, k) * spread, "fp8")
    codes, scale = columns_triton.blocks_to_columns(*q.buffers(), n, k)
    expected, expected_scale = fp8_backward.blocks_to_columns(*q.buffers(), n, k)
    assert torch.equal(scale, expected_scale) and codes.shape == expected.shape == (k, n)
    # The interpreter makes nonsense of fp16's denormals, of which e4m3 has nothing left.
    lost = q.dequantize().t().abs() < scale.view(k, 1) * 2.0**-14
    assert bool(lost.any()) and not bool((expected.view(torch.uint8) & 127)[lost].any())
    assert like(codes.view(torch.uint8)[~lost], expected.view(torch.uint8)[~lost])


def test_every_code_and_extreme_scales_to_columns() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(16).view(16, 256)
    byte = torch.tensor([0, 1, 127, 253, 254, 255, 9, 9], dtype=torch.uint8).repeat(16, 1)
    found, scale = columns_triton.blocks_to_columns(codes, byte, 16, 256)
    assert torch.equal(scale[0].isnan(), (torch.arange(256) // 32) == 5)
    wanted = fp8_backward.blocks_to_columns(codes, byte, 16, 256)[1]
    assert torch.equal(scale.nan_to_num(), wanted.nan_to_num())
    exact = codes.t().view(torch.float8_e4m3fn).float()
    assert torch.equal(found.float().nan_to_num(1.5), exact.nan_to_num(1.5))


@pytest.mark.parametrize(("n", "k"), [*TURNED, (48, 16), (128, 144)])
def test_codes_turned(n: int, k: int) -> None:
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    found, scale = columns_triton.turned(codes, n, k)
    assert torch.equal(found.view(torch.uint8), codes.t()) and torch.equal(scale, torch.ones(1, k))
