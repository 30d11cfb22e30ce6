"""fp8 against values worked out by hand, its error bounds, and DeepSeek's arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ts_quant

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
VALUES = st.lists(FLOATS, min_size=1, max_size=150)


def encode(values: object, layout: str | None = None) -> tuple[list[int], list[float]]:
    w = torch.as_tensor(values, dtype=torch.float32)
    codes, scale = ts_quant.quantize(w, "fp8", layout=layout).buffers()
    assert codes.dtype is torch.uint8 and codes.shape == w.shape
    return codes.flatten().tolist(), scale.flatten().tolist()


def test_codes_by_hand() -> None:
    # amax 448: scale 1 (byte 127). e4m3 has 3 bits of mantissa: 1.0625 ties down to 1, 1.1875 up
    # to 1.25, 17 to 16, 19 to 20; below 2^-6 steps of 2^-9; 2^-10 ties down to 0.
    values = [448.0, -448.0, 1.0, 1.0625, 1.1875, 17.0, -19.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10]
    codes, scale = encode(values)
    assert codes == [0x7E, 0xFE, 0x38, 0x38, 0x3A, 0x58, 0xDA, 0x01, 0x00, 0x02]
    assert scale == [127]
    assert encode([v * 2.0**-20 for v in values]) == (codes, [107])


def test_the_scale_is_the_smallest_power_of_two_that_clips_nothing() -> None:
    above = float(torch.nextafter(torch.tensor(448.0), torch.tensor(1000.0)))
    for amax, byte in ((448.0, 127), (above, 128), (449.0, 128), (224.0, 126), (225.0, 127)):
        assert encode([amax])[1] == [byte]
    assert encode([1.75])[1] == [119] and encode([1.7500001])[1] == [120]
    assert encode([2.0**-140])[1] == [0] and encode([0.0]) == ([0], [0])


def test_blocks_of_32_cross_rows_and_the_last_may_be_partial() -> None:
    w = torch.ones(3, 21)
    w[1, 11] = 448.0  # element 32, the second block's first
    codes, scale = encode(w)
    assert scale == [119, 127] and codes[31] == 0x78 and codes[32] == 0x7E and codes[33] == 0x38


def test_rows_tiles_and_matrices_by_hand() -> None:
    w = torch.zeros(130, 140)
    w[0, 0], w[0, 130], w[129, 0], w[5, 3] = 448.0, 4.48, -44.8, 1.0
    q = ts_quant.quantize(w, "fp8", layout="tile")
    assert q.buffers()[1].shape == (1, 2, 2)
    assert q.buffers()[1].flatten().tolist() == pytest.approx([1.0, 0.01, 0.1, 1.0])
    rows = ts_quant.quantize(w, "fp8", layout="row").buffers()[1].flatten()
    assert rows.shape == (130,)
    assert rows[:6].tolist() == pytest.approx([1.0, 1, 1, 1, 1, 1 / 448])
    assert float(rows[129]) == pytest.approx(0.1)
    assert ts_quant.quantize(w, "fp8", layout="tensor").buffers()[1].flatten().tolist() == [1.0]
    stacked = torch.stack([w, 2 * w])
    two = ts_quant.quantize(stacked, "fp8", layout="tensor").buffers()[1]
    assert two.flatten().tolist() == [1.0, 2.0]


@settings(max_examples=80, deadline=None)
@given(VALUES)
@example([3.4028234663852886e38, -3.4028234663852886e38, 1.0])
@example([1.401298464324817e-45, 0.0, -1.401298464324817e-45])
def test_no_value_is_further_than_half_a_step_from_its_decoded_self(values: list[float]) -> None:
    w = torch.tensor(values, dtype=torch.float32)
    q = ts_quant.quantize(w, "fp8")
    decoded = q.dequantize().double()
    assert bool(decoded.isfinite().all())
    scale = 2.0 ** (q.buffers()[1].double() - 127)
    x, s = w.double(), scale.repeat_interleave(32)[: w.numel()]
    # Half a step of 3 bits of mantissa: 2^-4 of the value; below 2^-6 of the scale 2^-10 of it.
    bound = torch.maximum(x.abs() * 2.0**-4, s * 2.0**-10)
    # One step where the nearest code would be infinite.
    bound = torch.where(x.abs() > 2.0**127, 2 * bound, bound)
    assert bool(((decoded - x).abs() <= bound * (1 + 2.0**-20)).all())


@settings(max_examples=40, deadline=None)
@given(VALUES, st.integers(1, 30), st.sampled_from(["row", "tensor", "tile"]))
@example([3.4028234663852886e38, -3.4028234663852886e38, 1.0], 1, "tensor")
def test_the_same_bound_with_fp32_scales(values: list[float], width: int, layout: str) -> None:
    usable = max(len(values) // width, 1) * width
    values = (values * width)[:usable]
    w = torch.tensor(values, dtype=torch.float32).view(-1, width)
    q = ts_quant.quantize(w, "fp8", layout=layout)
    decoded = q.dequantize().double()
    assert bool(decoded.isfinite().all())
    s, x = q.buffers()[1][0].double(), w.double()
    spread = s.repeat_interleave(q.spec.rows, 0)[: x.shape[0]]
    spread = spread.repeat_interleave(q.block_size, 1)[:, : x.shape[1]]
    bound = torch.maximum(x.abs() * 2.0**-4, spread * 2.0**-10)
    bound = torch.where(x.abs() > 2.0**127, 2 * bound, bound)
    assert bool(((decoded - x).abs() <= bound * (1 + 2.0**-20) + 2.0**-149).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [None, "row", "tile", "tensor"])
def test_nothing_finite_becomes_infinite_in_its_own_dtype(
    dtype: torch.dtype, layout: str | None
) -> None:
    top = torch.finfo(dtype).max
    w = torch.linspace(0.5 * top, top, 96).to(dtype).view(3, 32)
    decoded = ts_quant.quantize(w, "fp8", layout=layout).dequantize()
    assert bool(decoded.isfinite().all())
    assert bool(((decoded.double() - w.double()).abs() <= w.double() * 0.125).all())


def test_deepseek_blocks_are_read_as_stored() -> None:
    """Stacked experts with 128 x 128 tiles, both edges partial, decoded as DeepSeek does."""
    codes = torch.randn(3, 200, 300).to(torch.float8_e4m3fn)
    scale_inv = torch.rand(3, 2, 3) * 0.01
    layout = {"scales": "tile", "block_size": 128, "rows": 128}
    q = ts_quant.QuantTensor.from_buffers(
        "fp8",
        {"codes": codes, "scale": scale_inv},
        shape=codes.shape,
        dtype=torch.bfloat16,
        layout=layout,
    )
    spread = scale_inv.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :200, :300]
    assert torch.equal(q.dequantize(), (codes.float() * spread).bfloat16())
    assert q.buffers()[0].data_ptr() == codes.data_ptr()
    assert q.buffers()[1].data_ptr() == scale_inv.data_ptr()


def test_a_scale_per_matrix_may_be_zero_dimensional() -> None:
    codes = torch.randn(8, 6).to(torch.float8_e4m3fn)
    layout = {"scales": "tile", "block_size": 6, "rows": 8}
    q = ts_quant.QuantTensor.from_buffers(
        "fp8",
        {"codes": codes, "scale": torch.tensor(0.25)},
        shape=(8, 6),
        dtype=torch.bfloat16,
        layout=layout,
    )
    assert torch.equal(q.dequantize(torch.float32), codes.float() * 0.25)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"buffers": {"codes": torch.zeros(4, 4)}}, "do not make a 'fp8'"),
    ({"codes": torch.zeros(4, 4)}, r"'codes'.*torch\.float32; expected torch\.uint8"),
    ({"codes": torch.zeros(4, 5, dtype=torch.uint8)}, "20 elements.*expected 16"),
    ({"codes": torch.zeros(4, 8, dtype=torch.uint8)[:, ::2]}, "contiguous"),
    ({"scale": torch.zeros(2, dtype=torch.uint8)}, "'scale'.*expected 1"),
    ({"scale": torch.zeros(1, dtype=torch.uint8, device="meta")}, "several devices"),
    ({"layout": {"scales": "log8"}}, "'fp8'.*'scales'.*'e8m0', 'tile'"),
    ({"layout": {"scale": "e8m0"}}, "expected the keys"),
    ({"layout": {"scales": "tile", "rows": 0}}, "rows=0"),
    ({"layout": {"rows": 2}}, "rows=2"),
    ({"dtype": torch.int8}, r"torch\.int8"),
    ({"codec": "fp9"}, "unknown codec 'fp9'"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=range(len(BAD)))
def test_stored_buffers_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "codec": "fp8",
        "buffers": {
            "codes": torch.zeros(4, 4, dtype=torch.uint8),
            "scale": torch.zeros(1, dtype=torch.uint8),
        },
        "shape": (4, 4),
        "dtype": torch.bfloat16,
        "layout": None,
    }
    change = dict(change)
    for name in ("codes", "scale"):
        if name in change:
            change["buffers"] = {**good["buffers"], name: change.pop(name)}
    arguments = {**good, **change}
    codec, buffers = arguments.pop("codec"), arguments.pop("buffers")
    with pytest.raises(ts_quant.OptionError, match=message):
        ts_quant.QuantTensor.from_buffers(codec, buffers, **arguments)
