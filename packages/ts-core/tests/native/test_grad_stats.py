"""Sum of squares and count of non-finite elements."""

from __future__ import annotations

import math

import pytest
import torch

from ts_core import _native

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def stats(tensor: torch.Tensor, threads: int = 0) -> tuple[float, int]:
    name = str(tensor.dtype).removeprefix("torch.")
    return _native.grad_stats(tensor.data_ptr(), name, tensor.numel(), threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 4099, 65536, 65537, 300_007])
def test_sum_of_squares_is_fp64_accurate(each_level: str, dtype: torch.dtype, n: int) -> None:
    tensor = (torch.randn(n) * 2.0 ** torch.randint(-20, 10, (n,))).to(dtype)
    total, nonfinite = stats(tensor)
    exact = math.fsum((tensor.double() ** 2).tolist())
    assert nonfinite == 0
    # Squares of fp32 are exact in fp64; a sum of n terms in any order errs by (n - 1) ulp / 2.
    assert abs(total - exact) <= n * 2.0**-53 * exact


@pytest.mark.parametrize("n", [5, 65535, 65536, 200_003])
def test_levels_and_threads_give_the_same_bits(
    simd_levels: list[str], many_cores: None, n: int
) -> None:
    for dtype in DTYPES:
        tensor = torch.randn(n).to(dtype)
        totals = set()
        for level in simd_levels:
            _native.set_simd_level(level)
            totals |= {stats(tensor, threads)[0] for threads in (1, 2, 5, 8)}
        assert len(totals) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_nonfinite_element_counts_and_reaches_the_sum(
    each_level: str, dtype: torch.dtype
) -> None:
    tensor = torch.ones(70_001, dtype=dtype)
    places = [0, 7, 8, 15, 16, 65535, 65536, 69_999, 70_000]
    for index, place in enumerate(places):
        tensor[place] = [math.inf, -math.inf, math.nan][index % 3]
    total, nonfinite = stats(tensor)
    assert nonfinite == len(places)
    assert math.isnan(total)
    tensor[tensor.isnan()] = 1
    assert stats(tensor) == (math.inf, 6)


def test_large_but_finite_values_are_not_counted(each_level: str) -> None:
    tensor = torch.full((33,), torch.finfo(torch.float32).max)
    total, nonfinite = stats(tensor)
    assert nonfinite == 0
    assert total == pytest.approx(33 * torch.finfo(torch.float32).max ** 2, rel=1e-15)


def test_addresses_need_no_alignment(each_level: str) -> None:
    values = torch.randn(1003)
    buffer = torch.zeros(4 * 1003 + 8, dtype=torch.uint8)
    buffer[3 : 3 + 4 * 1003] = values.view(torch.uint8)
    assert _native.grad_stats(buffer.data_ptr() + 3, "float32", 1003) == stats(values)
