"""NF4 against bytes worked out by hand, and its analytic error bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ts_quant
from ts_quant.codecs.nf4 import CODEBOOK

# fp32 midpoints of neighbouring codes.
THRESHOLDS = (
    -0.8480963706970215,
    -0.6106328964233398,
    -0.4599952697753906,
    -0.33967941999435425,
    -0.23460739850997925,
    -0.13791173696517944,
    -0.045525018125772476,
    0.03979014977812767,
    0.120255246758461,
    0.2035212516784668,
    0.2920137643814087,
    0.3893125355243683,
    0.5016634464263916,
    0.6427869200706482,
    0.8614784479141235,
)


def encode(values: object, block_size: int = 64) -> tuple[list[int], list[float]]:
    q = ts_quant.quantize(torch.as_tensor(values, dtype=torch.float32), "nf4", block_size)
    codes, absmax = q.buffers()
    assert codes.dtype is torch.uint8 and codes.dim() == 2 and codes.shape[1] == 1
    assert absmax.dtype is torch.float32 and absmax.dim() == 1
    return codes.flatten().tolist(), absmax.tolist()


@pytest.mark.parametrize("scale", [1.0, 2.0, 0.5, 2.0**100, 2.0**-120])
def test_the_codebook_itself(scale: float) -> None:
    codes, absmax = encode([code * scale for code in CODEBOOK], block_size=16)
    assert codes == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
    assert absmax == [scale]


def test_a_tie_takes_the_lower_code_and_the_next_float_the_upper() -> None:
    codes, absmax = encode([*THRESHOLDS, 1.0], block_size=16)
    # Threshold k lies between codes k and k + 1: k = 0..14, then 1.0 is code 15.
    assert codes == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
    assert absmax == [1.0]
    above = torch.nextafter(torch.tensor(THRESHOLDS), torch.tensor(2.0)).tolist()
    codes, _ = encode([*above, 1.0], block_size=16)
    assert codes == [0x12, 0x34, 0x56, 0x78, 0x9A, 0xBC, 0xDE, 0xFF]
    below = torch.nextafter(torch.tensor(THRESHOLDS), torch.tensor(-2.0)).tolist()
    codes, _ = encode([*below, 1.0], block_size=16)
    assert codes == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]


def test_blocks_cross_rows_and_the_last_may_be_partial() -> None:
    # Flattened: [1, -1, 0, 0.5 | -2, 1]; 0.5 lies between 0.3893 and 0.5017: code 12.
    codes, absmax = encode([[1.0, -1.0, 0.0], [0.5, -2.0, 1.0]], block_size=4)
    assert codes == [0xF0, 0x7C, 0x0C]
    assert absmax == [1.0, 2.0]


def test_an_odd_tensor_ends_with_the_code_of_zero() -> None:
    assert encode([1.0, 0.0, -1.0]) == ([0xF7, 0x07], [1.0])
    assert encode([-3.0]) == ([0x07], [3.0])
    assert encode(2.0) == ([0xF7], [2.0])  # a 0-d tensor


def test_blocks_of_zeros_are_0x77_and_decode_to_zeros() -> None:
    # bitsandbytes' CUDA back end writes 0x00 here, its CPU back end 0x77; both decode to zeros.
    assert encode([0.0, -0.0, 0.0, 0.0, 5.0, 0.0], block_size=4) == (
        [0x77, 0x77, 0xF7],
        [0.0, 5.0],
    )
    q = ts_quant.quantize(torch.zeros(3, 5), "nf4")
    assert torch.equal(q.dequantize(), torch.zeros(3, 5))


def test_no_elements() -> None:
    assert encode([]) == ([], [])


def test_decoded_values_are_code_times_absmax() -> None:
    q = ts_quant.quantize(torch.tensor([3.0, -1.5, 0.3, 0.0]), "nf4", block_size=4)
    # -0.5 is code 2 (-0.525 beats -0.395: the midpoint is -0.46); 0.1 is code 8.
    assert q.buffers()[0].flatten().tolist() == [0xF2, 0x87]
    products = [3.0, -0.5250730514526367 * 3.0, 0.07958029955625534 * 3.0, 0.0]
    assert q.dequantize().tolist() == torch.tensor(products, dtype=torch.float64).float().tolist()
    rounded = torch.tensor(products, dtype=torch.float64).float().bfloat16()
    assert torch.equal(q.dequantize(torch.bfloat16), rounded)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=200),
    st.integers(1, 40).map(lambda half: 2 * half),
)
@example([3.4028234663852886e38, -3.4028234663852886e38, 1.0], 2)
@example([1.401298464324817e-45, 0.0, -1.401298464324817e-45, 5e-45], 4)
def test_no_value_is_further_than_half_a_step_from_its_decoded_self(
    values: list[float], block_size: int
) -> None:
    w = torch.tensor(values, dtype=torch.float32)
    decoded = ts_quant.quantize(w, "nf4", block_size).dequantize().double()
    assert bool(torch.isfinite(decoded).all())
    code = torch.tensor(CODEBOOK, dtype=torch.float64)
    for start in range(0, len(values), block_size):
        x = w[start : start + block_size].double()
        absmax = x.abs().max()
        unit = x / absmax if absmax > 0 else x
        upper = torch.searchsorted(code, unit.clamp(-1, 1)).clamp(1, 15)
        half_step = (code[upper] - code[upper - 1]) / 2 * absmax
        # fp32 rounding of 1 / absmax, of the product with it, of the thresholds and of the
        # decoded product: at most 2^-24 each, relative to absmax; 2^-150 if denormal.
        slack = absmax * 4 * 2.0**-24 + 2.0**-149
        assert bool(((decoded[start : start + block_size] - x).abs() <= half_step + slack).all())


def test_scales_of_denormal_blocks_do_not_overflow() -> None:
    # 1 / absmax is infinite in fp32 for these.
    tiny = 2.0**-149
    codes, absmax = encode([tiny, 0.0, -tiny, tiny], block_size=4)
    assert codes == [0xF7, 0x0F]
    assert absmax == [tiny]
