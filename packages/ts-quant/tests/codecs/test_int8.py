"""int8 against values worked out by hand, its error bound, and the kernel's constants."""

from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ts_quant
from ts_quant.codecs.int8 import UNIT_HIGH, UNIT_LOW


def encode(values: object, block_size: int = 64) -> tuple[list[int], list[float]]:
    q = ts_quant.quantize(torch.as_tensor(values, dtype=torch.float32), "int8", block_size)
    codes, absmax = q.buffers()
    assert codes.dtype is torch.int8 and codes.dim() == 1 and absmax.dtype is torch.float32
    return codes.tolist(), absmax.tolist()


def test_codes_by_hand() -> None:
    # times 127: 127, -127, 63.5 (tie to even: 64), -63.5, 31.75, 95.25, 15.875, 0.99, 0.496, 0
    values = [1.0, -1.0, 0.5, -0.5, 0.25, 0.75, 0.125, 2.0**-7, 2.0**-8, 0.0]
    assert encode(values) == ([127, -127, 64, -64, 32, 95, 16, 1, 0, 0], [1.0])
    assert encode([8 * v for v in values])[0] == [127, -127, 64, -64, 32, 95, 16, 1, 0, 0]


def test_blocks_cross_rows_and_the_last_may_be_partial() -> None:
    codes, absmax = encode([[1.0, -1.0, 0.0], [0.5, -2.0, 1.0]], block_size=4)
    assert codes == [127, -127, 0, 64, -127, 64]
    assert absmax == [1.0, 2.0]


def test_zeros_and_no_elements() -> None:
    assert encode([0.0, -0.0, 3.0], block_size=2) == ([0, 0, 127], [0.0, 3.0])
    assert encode([]) == ([], [])
    zeros = ts_quant.quantize(torch.zeros(3, 5), "int8").dequantize()
    assert torch.equal(zeros, torch.zeros(3, 5))


def test_decoded_values_are_the_unit_value_times_absmax() -> None:
    codes = torch.arange(-127, 128, dtype=torch.int8)
    q = ts_quant.quantize(torch.ones(255) * 3.0, "int8", block_size=256)
    q.codes = codes  # type: ignore[attr-defined]
    unit = codes.float() / 127  # IEEE division, correctly rounded
    assert torch.equal(q.dequantize(), unit * 3.0)
    assert q.dequantize()[-1] == 3.0


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
    decoded = ts_quant.quantize(w, "int8", block_size).dequantize().double()
    assert bool(torch.isfinite(decoded).all())
    for start in range(0, len(values), block_size):
        x = w[start : start + block_size].double()
        absmax = x.abs().max()
        # fp32 rounding of the quotient, of its product with 127, of q / 127 and of the decoded
        # product: at most 2^-24 each, relative to absmax; 2^-150 if denormal.
        bound = absmax / 254 + absmax * 4 * 2.0**-24 + 2.0**-149
        assert bool(((decoded[start : start + block_size] - x).abs() <= bound).all())


def nearest_fp32(exact: Fraction) -> float:
    """`exact` rounded to fp32, ties to even, by comparing neighbours."""
    guess = torch.tensor(float(exact), dtype=torch.float32)
    near = [guess, *(torch.nextafter(guess, torch.tensor(s)) for s in (-2.0, 2.0))]

    def distance(value: torch.Tensor) -> tuple[Fraction, int]:
        return abs(Fraction(float(value)) - exact), int(value.view(torch.int32)) & 1

    return float(min(near, key=distance))


def test_the_kernels_two_constants_give_the_rounded_quotient_for_every_code() -> None:
    low = Fraction(nearest_fp32(Fraction(UNIT_LOW)))
    assert float(low) == UNIT_LOW, "UNIT_LOW must be representable in fp32"
    high = Fraction(UNIT_HIGH)
    for q in range(-127, 128):
        exact = nearest_fp32(Fraction(q, 127))
        assert nearest_fp32(q * high) == float(q * high), "the first product is exact"
        low_product = Fraction(nearest_fp32(q * low))
        assert nearest_fp32(q * high + low_product) == exact  # unfused, or q * high fused
        assert nearest_fp32(q * high + q * low) == exact  # q * low fused
