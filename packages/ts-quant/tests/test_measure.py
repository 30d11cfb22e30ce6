"""ts_quant.error against its definition."""

from __future__ import annotations

import math

import pytest
import torch

import ts_quant
from ts_quant import measure


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_the_distance_to_the_decoded_weight(
    codec: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = torch.randn(50, 130).to(dtype)
    difference = ts_quant.quantize(w, codec, 32).dequantize().double() - w.double()
    expected = float(difference.norm() / w.double().norm())
    for chunk in (1 << 22, 1024):
        monkeypatch.setattr(measure, "_CHUNK_VALUES", chunk)
        stats = ts_quant.error(w, codec, block_size=32)
        assert math.isclose(stats.relative, expected, rel_tol=1e-12)
        assert stats.max_abs == float(difference.abs().max())


def test_normal_weights_lose_what_the_formats_promise() -> None:
    w = torch.randn(256, 512)
    # FORMATS: int8 about 0.6 %; NF4 at block 64 loses about 9 % in norm.
    assert 0.004 < ts_quant.error(w, "int8").relative < 0.008
    assert 0.07 < ts_quant.error(w, "nf4").relative < 0.11
    smaller_blocks = ts_quant.error(w, "nf4", block_size=32).relative
    assert smaller_blocks < ts_quant.error(w, "nf4").relative


def test_zeros_nothing_and_nan(codec: str) -> None:
    assert ts_quant.error(torch.zeros(70), codec) == ts_quant.ErrorStats(0.0, 0.0)
    assert ts_quant.error(torch.empty(0), codec) == ts_quant.ErrorStats(0.0, 0.0)
    with pytest.raises(ts_quant.NonFiniteWeightError, match="lm_head"):
        ts_quant.error(torch.tensor([float("nan")]), codec, name="lm_head")
