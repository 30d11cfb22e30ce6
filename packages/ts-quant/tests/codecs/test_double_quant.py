"""One-byte scales: trainstream's own ("log8") and bitsandbytes' nested ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import ts_quant
from ts_quant.codecs.nf4 import CODEBOOK

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def test_scales_by_hand() -> None:
    # Blocks of 2 with absmax 1, 2^-1/16, 2^-15.875 (the last code), 2^-20 (below it), 0.
    step = 2.0 ** (-1 / 16)
    w = torch.tensor([1.0, 0, step, 0, 2.0**-15.875, 0, 2.0**-20, 0, 0, 0])
    for codec in ("nf4", "int8"):
        _, codes, largest = ts_quant.quantize(w, codec, 2, double_quant=True).buffers()
        assert codes.dtype is torch.uint8 and largest.tolist() == [1.0]
        assert codes.tolist() == [255, 254, 1, 1, 0]
    # Between two codes NF4 takes the nearer and int8 the upper.
    w = torch.tensor([1.0, 0, 0.96, 0, 0.98, 0])
    assert ts_quant.quantize(w, "nf4", 2, double_quant=True).buffers()[1].tolist() == [
        255,
        254,
        255,
    ]
    assert ts_quant.quantize(w, "int8", 2, double_quant=True).buffers()[1].tolist() == [
        255,
        255,
        255,
    ]


def test_256_blocks_share_a_number() -> None:
    w = torch.ones(2 * 600)
    w[2 * 256] = 8.0
    _, codes, largest = ts_quant.quantize(w, "nf4", 2, double_quant=True).buffers()
    assert largest.tolist() == [1.0, 8.0, 1.0]
    assert codes[255] == 255 and codes[256] == 255 and codes[257] == 255 - 3 * 16
    assert codes[511] == 255 - 3 * 16 and codes[512] == 255


def test_bytes_per_weight() -> None:
    from ts_quant.codecs.base import codec_named

    for codec in ("nf4", "int8"):
        q = ts_quant.quantize(torch.randn(256, 256), codec, double_quant=True)
        per_weight = codec_named(codec).bytes_per_weight(64, True)
        assert q.nbytes / q.numel() == per_weight
        saved = 8 * (codec_named(codec).bytes_per_weight(64) - per_weight)
        assert 0.37 < saved < 0.375  # bits


@settings(max_examples=60, deadline=None)
@given(
    st.lists(FLOATS, min_size=1, max_size=200),
    st.integers(1, 20).map(lambda half: 2 * half),
    st.sampled_from(["nf4", "int8"]),
)
@example([3.4028234663852886e38, -3.4028234663852886e38, 1.0], 2, "int8")
@example([1.401298464324817e-45, 0.0, -1.401298464324817e-45, 5e-45], 2, "nf4")
@example([0.0, 4506.0, 3.157125440123813e-42], 2, "nf4")
def test_no_value_is_further_than_half_a_step_of_the_scale_that_is_used(
    values: list[float], block_size: int, codec: str
) -> None:
    w = torch.tensor(values, dtype=torch.float32)
    q = ts_quant.quantize(w, codec, block_size, double_quant=True)
    decoded, x = q.dequantize().double(), w.double()
    assert bool(decoded.isfinite().all())
    _, codes, largest = q.buffers()
    factor = torch.where(codes > 0, 2.0 ** ((codes.double() - 255) / 16), 0.0)
    scale = factor * largest.double().repeat_interleave(256)[: len(codes)]
    absmax = torch.stack([part.abs().max() for part in x.split(block_size)])
    group = largest.double().repeat_interleave(256)[: len(codes)]
    inside = absmax > group * 2.0**-15.8
    ratio = scale[inside] / absmax[inside]
    low, high = (-1 / 31, 1 / 31) if codec == "nf4" else (-1e-5, 1 / 15.9)
    normal = absmax[inside] > 2.0**-120
    assert bool(((ratio >= 2.0**low) & (ratio <= 2.0**high))[normal].all())
    spread = scale.repeat_interleave(block_size)[: len(x)]
    if codec == "int8":
        step = spread / 254
    else:
        code = torch.tensor(CODEBOOK, dtype=torch.float64)
        unit = torch.where(spread > 0, x / spread.clamp(min=2.0**-300), 0.0).clamp(-1, 1)
        upper = torch.searchsorted(code, unit.contiguous()).clamp(1, 15)
        step = (code[upper] - code[upper - 1]) / 2 * spread
    assert bool(((decoded - x).abs() <= step + spread * 2.0**-21 + 2.0**-148).all())


def test_it_costs_little_accuracy() -> None:
    w = torch.randn(512, 512)
    for codec in ("nf4", "int8"):
        plain = ts_quant.error(w, codec).relative
        double = ts_quant.error(w, codec, double_quant=True).relative
        assert abs(double / plain - 1) < {"nf4": 0.01, "int8": 0.06}[codec]


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("shape", [(96, 64), (257, 300), (5, 7)])
def test_nested_scales_decode_as_bitsandbytes_does(shape: tuple[int, int], block_size: int) -> None:
    bnb = pytest.importorskip("bitsandbytes.functional")
    w = torch.randn(shape) * 0.02
    codes, state = bnb.quantize_4bit(
        w, quant_type="nf4", blocksize=block_size, compress_statistics=True
    )
    nested = state.state2
    q = ts_quant.QuantTensor.from_buffers(
        "nf4",
        {
            "codes": codes,
            "absmax_codes": state.absmax,
            "nested_absmax": nested.absmax,
            "nested_map": nested.code,
            "nested_offset": state.offset,
        },
        shape=shape,
        dtype=torch.float32,
        layout={"scales": "nested", "block_size": block_size},
    )
    assert nested.blocksize == 256 and same_memory(q.buffers()[0], codes)
    # As one long row: bitsandbytes 0.50's AVX-512 kernel takes the scales of other blocks where
    # rows end within a block.
    state.shape = torch.Size((1, w.numel()))
    assert torch.equal(q.dequantize(), bnb.dequantize_4bit(codes, state).view(shape))
    half = torch.nn.functional.linear(torch.randn(2, shape[1]), q)
    assert half.shape == (2, shape[0])
    with pytest.raises(ts_quant.OptionError, match="read from checkpoints"):
        q.copy_(w)


def same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()
