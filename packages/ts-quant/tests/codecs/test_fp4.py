"""nvfp4 and mxfp4 against values worked out by hand, their owners' arithmetic, error bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import ts_quant

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nibbles(codes: Tensor, n: int) -> list[int]:
    return torch.stack([codes.view(-1) & 15, codes.view(-1) >> 4], 1).view(-1)[:n].tolist()


def test_ties_go_to_the_even_code() -> None:
    # A block whose largest value is 6 has scale 1 in mxfp4 (byte 127).
    values = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5]
    values += [-5.0, -6.0, 0.2500001, 0.7499999, 5.0000005, 0.0, -0.0]
    codes, scale = ts_quant.quantize(torch.tensor(values), "mxfp4").buffers()
    assert scale.tolist() == [127] and codes.shape == (11,)
    assert nibbles(codes, len(values)) == [
        7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 15, 1, 1, 7, 0, 0,
    ]  # fmt: skip


def test_the_low_nibble_comes_first_and_an_odd_end_is_padded_with_zero() -> None:
    codes, _ = ts_quant.quantize(torch.tensor([6.0, 1.0, -2.0]), "mxfp4").buffers()
    assert codes.tolist() == [0x27, 0x0C]


def test_mxfp4_scales_by_hand() -> None:
    for amax, byte in ((6.0, 127), (6.5, 128), (12.0, 128), (3.0, 126), (3.1, 127), (0.0, 0)):
        assert ts_quant.quantize(torch.tensor([amax]), "mxfp4").buffers()[1].tolist() == [byte]


def test_nvfp4_by_hand() -> None:
    # amax 2688 = 6 * 448: global 1. The second block's absmax 3 has scale 0.5 (e4m3 0x30), the
    # third's 6 * 2^-12 would be below 2^-9 and is clamped to it (0x01), the last is zeros.
    w = torch.zeros(64)
    w[0], w[1], w[16], w[17], w[32], w[33] = 2688.0, -448.0, 3.0, -0.75, 6 * 2.0**-12, 2.0**-12
    codes, scale, global_scale = ts_quant.quantize(w, "nvfp4").buffers()
    assert global_scale.tolist() == [1.0]
    assert scale.tolist() == [0x7E, 0x30, 0x01, 0x01]
    got = nibbles(codes, 64)
    assert got[:2] == [7, 10] and got[16:18] == [7, 11]
    assert got[32:34] == [2, 0] and got[34:] == [0] * 30  # 0.75 ties up to 1; 0.125 to 0
    again = ts_quant.quantize(w / 4096, "nvfp4").buffers()
    assert torch.equal(again[0], codes) and torch.equal(again[1], scale)
    assert again[2].tolist() == [2.0**-12]


def modelopt(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NVFP4 as FORMATS and ModelOpt's definition have it, in plain fp32 steps."""
    weight_scale_2 = w.abs().max() / (6.0 * 448.0)
    blocks = w.view(-1, 16)
    scale = blocks.abs().amax(1) / (6.0 * weight_scale_2)
    scale = scale.clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
    units = blocks / (scale.float() * weight_scale_2)[:, None]
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    index = torch.searchsorted(bounds, units.abs())
    index += (units.abs()[..., None] == bounds[[1, 3, 5]]).any(-1)
    codes = (units < 0).long() * 8 + index
    return codes.view(-1), scale, weight_scale_2


def test_nvfp4_bytes_are_those_of_the_definition() -> None:
    w = torch.randn(64, 256) * 0.02
    codes, scale, global_scale = ts_quant.quantize(w, "nvfp4").buffers()
    expected, expected_scale, weight_scale_2 = modelopt(w)
    assert nibbles(codes, w.numel()) == expected.tolist()
    assert torch.equal(scale, expected_scale.view(torch.uint8))
    assert float(global_scale) == float(weight_scale_2)


@pytest.mark.parametrize("layout", ["e4m3", "e4m3_div"])
def test_stored_nvfp4_is_read_as_its_owner_reads_it(layout: str) -> None:
    packed = torch.randint(0, 256, (40, 24), dtype=torch.uint8)
    scale = torch.rand(40, 3).mul_(400).to(torch.float8_e4m3fn)
    number = torch.tensor(0.0123) if layout == "e4m3" else torch.tensor([81.3])
    q = ts_quant.QuantTensor.from_buffers(
        "nvfp4",
        {"codes": packed, "scale": scale, "global_scale": number},
        shape=(40, 48),
        dtype=torch.bfloat16,
        layout={"scales": layout},
    )
    factor = scale.float() * number if layout == "e4m3" else scale.float() / number
    code = torch.stack([packed & 15, packed >> 4], 2).view(40, 48).long()
    units = torch.where(code >= 8, -E2M1[code & 7], E2M1[code & 7])
    expected = units * factor.repeat_interleave(16, 1)
    assert torch.equal(q.dequantize(torch.float32), expected)
    assert torch.equal(q.dequantize(), expected.bfloat16())
    assert q.buffers()[0].data_ptr() == packed.data_ptr() and q.shape == (40, 48)


def test_stacked_experts_of_gpt_oss_are_read_as_transformers_reads_them() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (2, 12, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 12, 3), dtype=torch.uint8)
    expected = mxfp4.convert_moe_packed_tensors(blocks.clone(), scales.clone())
    q = ts_quant.QuantTensor.from_buffers(
        "mxfp4", {"codes": blocks, "scale": scales}, shape=(2, 12, 96), dtype=torch.bfloat16
    )
    assert q.buffers()[0].shape == blocks.shape  # not copied, not reshaped
    assert torch.equal(q.dequantize().transpose(1, 2), expected)


def largest_error(x: Tensor, scale: Tensor) -> Tensor:
    """Half the gap around x between e2m1 values, or what is clipped beyond 6."""
    unit = (x.abs() / scale).clamp(max=1e30)
    upper = torch.searchsorted(E2M1.double(), unit).clamp(1, 7)
    gap = (E2M1[upper] - E2M1[upper - 1]).double() / 2
    return scale * torch.maximum(gap, unit - 6)


@settings(max_examples=80, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=150), st.sampled_from(["nvfp4", "mxfp4"]))
@example([3.4028234663852886e38, -3.4028234663852886e38, 1.0], "mxfp4")
@example([3.4028234663852886e38, -3.4028234663852886e38, 1.0], "nvfp4")
@example([1.401298464324817e-45, 0.0, -1.401298464324817e-45], "nvfp4")
@example([1.0, 1e-30], "nvfp4")
def test_no_value_is_further_than_half_a_step_from_its_decoded_self(
    values: list[float], codec: str
) -> None:
    w = torch.tensor(values, dtype=torch.float32)
    q = ts_quant.quantize(w, codec)
    decoded, x = q.dequantize().double(), w.double()
    assert bool(decoded.isfinite().all())
    _, stored, *rest = q.buffers()
    if codec == "mxfp4":
        scale = 2.0 ** (stored.double() - 127)
        assert bool((x.abs() <= 6 * scale.repeat_interleave(32)[: len(x)]).all())
    else:
        scale = (stored.view(torch.float8_e4m3fn).float() * rest[0]).double()
    spread = scale.repeat_interleave(q.block_size)[: len(x)]
    bound = largest_error(x, spread)
    # One step where the nearest code would be infinite.
    bound = torch.where(x.abs() > 2.0**127, 2 * bound + spread, bound)
    assert bool(((decoded - x).abs() <= bound + x.abs() * 2.0**-21 + 2.0**-149).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("codec", ["nvfp4", "mxfp4"])
def test_nothing_finite_becomes_infinite_in_its_own_dtype(codec: str, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    w = torch.linspace(0.5 * top, top, 192).to(dtype).view(6, 32)
    decoded = ts_quant.quantize(w, codec).dequantize()
    assert bool(decoded.isfinite().all())
    assert bool(((decoded.double() - w.double()).abs() <= w.double() * 0.34).all())
