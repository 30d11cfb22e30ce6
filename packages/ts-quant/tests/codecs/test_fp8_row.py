"""The codec "fp8_row": FP8 with a scale per row, by a name of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ts_quant
from ts_quant import measure
from ts_quant.codecs.base import codec_named
from ts_quant.matmul import fp8


@pytest.mark.parametrize("shape", [(48, 64), (3, 16, 32), (7, 5), (5,), (0, 8), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_fp8_in_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    w = torch.randn(shape).to(dtype)
    found = ts_quant.quantize(w, "fp8_row")
    wanted = ts_quant.quantize(w, "fp8", layout="row")
    assert found.codec == "fp8" and found._spec == wanted._spec
    assert found._spec.scales == "tile" and found._spec.rows == 1
    for mine, other in zip(found.buffers(), wanted.buffers(), strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(found.dequantize(), wanted.dequantize())


def test_its_products_need_no_turning() -> None:
    w = ts_quant.quantize(torch.randn(32, 64, dtype=torch.bfloat16), "fp8_row")
    assert fp8.activation_kind(w._spec, w.shape, 4) == fp8.ROWS
    assert w.nbytes == 32 * 64 + 32 * 4


def test_it_is_found_by_name_and_refuses_what_is_not_a_row() -> None:
    codec = codec_named("fp8_row")
    assert codec.stored_as == "fp8" and codec_named("nf4").stored_as == "nf4"
    assert codec.bytes_per_weight() == 1.0
    assert codec.error_rank_order == codec_named("fp8").error_rank_order
    with pytest.raises(ts_quant.OptionError, match=r"'tile'.*one scale per row"):
        ts_quant.quantize(torch.randn(4, 4), "fp8_row", layout="tile")
    with pytest.raises(ts_quant.OptionError, match=r"double_quant=True .* 'fp8_row'"):
        codec.bytes_per_weight(64, True)
    with pytest.raises(ts_quant.OptionError, match=r"double_quant=True .* 'fp8_row'"):
        ts_quant.quantize(torch.randn(4, 4), "fp8_row", double_quant=True)


def test_errors_are_those_of_the_weight_and_no_worse_than_in_blocks() -> None:
    torch.manual_seed(0)
    w = torch.randn(256, 512)
    found = measure.error(w, "fp8_row")
    exact = (ts_quant.quantize(w, "fp8_row").dequantize() - w).norm() / w.norm()
    assert found.relative == pytest.approx(float(exact), rel=1e-4)
    assert found.relative < 1.05 * measure.error(w, "fp8").relative


def test_a_saved_model_and_a_report_name_it_as_fp8() -> None:
    model = nn.Linear(64, 32)
    store = ts_quant.storing.Storer("fp8_row", error_rank=2)
    stored = store.store(model.weight.detach(), "weight").weight
    assert stored.codec == "fp8" and store.report.kept_precise == []
    assert store.report.rows["weight"].codec == "fp8"


def test_stored_buffers_taken_by_its_name_are_of_codec_fp8() -> None:
    """Kernels and products know the format by the codec that a weight names."""
    w = torch.randn(48, 64, dtype=torch.bfloat16)
    wanted = ts_quant.quantize(w, "fp8_row")
    buffers = dict(zip(("codes", "scale"), wanted.buffers(), strict=True))
    found = ts_quant.QuantTensor.from_buffers("fp8_row", buffers, shape=w.shape, dtype=w.dtype)
    assert found.codec == "fp8" and found.spec == wanted.spec
    assert torch.equal(found.dequantize(), wanted.dequantize())
    assert fp8.activation_kind(found.spec, found.shape, 4) == fp8.ROWS
    with pytest.raises(ts_quant.OptionError, match="'fp8_row'"):
        ts_quant.QuantTensor.from_buffers(
            "fp8_row", buffers, shape=w.shape, dtype=w.dtype, layout={"scales": "e8m0"}
        )


def test_a_gradient_of_integers_is_refused() -> None:
    """The weight would be rounded to integers."""
    w = ts_quant.quantize(torch.randn(48, 64), "fp8_row")
    with pytest.raises(ts_quant.OptionError, match=r"floating dtype, not torch\.int64"):
        w.input_gradient(torch.ones(2, 48, dtype=torch.int64))
    torch.testing.assert_close(w.input_gradient(torch.ones(2, 48))[1], w.dequantize().sum(0))
