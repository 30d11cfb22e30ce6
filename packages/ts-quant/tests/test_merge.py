"""Merging an update: exact where it can be, measured where it cannot."""

from __future__ import annotations

import pytest
import torch

import ts_quant
from ts_quant.merge import MergeReport, merge_weight


def _case(size: float = 0.02) -> tuple[torch.Tensor, ts_quant.QuantTensor, torch.Tensor]:
    weight = (torch.randn(64, 128) * 0.05).bfloat16()
    delta = torch.randn(64, 4) @ torch.randn(4, 128)
    return weight, ts_quant.quantize(weight, "nf4"), delta * (size * weight.norm() / delta.norm())


def test_into_the_dequantized_base() -> None:
    _, stored, delta = _case()
    merged, row = merge_weight(stored, delta, "dequantized", name="m")
    trained = stored.dequantize().float() + delta
    assert merged.dtype is torch.bfloat16 and not isinstance(merged, ts_quant.QuantTensor)
    assert torch.equal(merged, trained.bfloat16())
    assert row.error < 2.0**-8 and row.survived == pytest.approx(1, abs=0.01)
    assert row.delta == pytest.approx(0.02, rel=0.02)  # bf16 norms


def test_into_the_original_weights() -> None:
    weight, stored, delta = _case()
    merged, row = merge_weight(stored, delta, "original", original=weight, name="m")
    assert torch.equal(merged, (weight.float() + delta).bfloat16())
    assert row.survived == pytest.approx(1, abs=0.01)
    # Not the model that was trained: it differs by what quantization had lost.
    lost = ts_quant.error(weight, "nf4").relative
    assert row.error == pytest.approx(lost, rel=0.05)


def test_an_adapter_that_started_at_the_error_is_not_counted_twice() -> None:
    weight = torch.randn(64, 96)
    found = ts_quant.loftq(weight, "nf4", rank=16)
    started = found.b @ found.a
    learned = torch.randn_like(weight) * 0.01
    merged, row = merge_weight(
        found.weight, started + learned, "original", original=weight, started=started
    )
    torch.testing.assert_close(merged, weight + learned)
    assert row.survived == pytest.approx(1, abs=1e-3) and row.noise < 1e-3
    doubled, _ = merge_weight(found.weight, started + learned, "original", original=weight)
    assert float((doubled - weight - learned).norm()) > 2 * float((merged - weight).norm())


@pytest.mark.parametrize("into", ["dequantized", "original"])
def test_transposed_weights_merge_as_others(into: str) -> None:
    weight, stored, delta = _case()
    options = {"original": weight, "started": delta / 2}
    expected, row = merge_weight(stored, delta, into, **options)  # type: ignore[arg-type]
    swapped = {name: value.t() for name, value in options.items()}
    seen = ts_quant.TransposedQuantTensor(stored)
    merged, other = merge_weight(seen, delta.t(), into, **swapped)  # type: ignore[arg-type]
    assert torch.equal(merged.t(), expected)
    assert other.error == pytest.approx(row.error, rel=1e-6)


@pytest.mark.parametrize("into", ["nf4", "int8"])
def test_requantized(into: str) -> None:
    _, stored, delta = _case(size=0.05)
    merged, row = merge_weight(stored, delta, into, name="m")
    assert isinstance(merged, ts_quant.QuantTensor) and merged.codec == into
    trained = stored.dequantize().float() + delta
    expected = float((merged.dequantize(torch.float32) - trained).norm() / trained.norm())
    assert row.error == pytest.approx(expected, rel=1e-3)
    if into == "int8":
        assert row.survived == pytest.approx(1, abs=0.02) and row.noise < 0.2
    else:
        assert row.noise > 0.5  # four bits: the steps are far larger than the update


def test_an_update_below_a_steps_size_is_reported_as_lost() -> None:
    _, stored, _ = _case()
    tiny = torch.full((64, 128), 1e-9)
    _, row = merge_weight(stored, tiny, "dequantized")
    zeros = float((stored.dequantize() == 0).float().mean())  # where nothing is rounded away
    assert row.survived == pytest.approx(zeros, rel=0.01) and zeros < 0.2


def test_report_sums_matrices_by_their_sizes() -> None:
    report = MergeReport("nf4")
    assert report.error == 0.0 and report.survived == 1.0
    for name, size in (("a", 0.02), ("b", 0.2)):
        _, stored, delta = _case(size)
        report.rows.append(merge_weight(stored, delta, "nf4", name=name)[1])
    errors = [row.error for row in report.rows]
    assert min(errors) <= report.error <= max(errors)
    survived = sorted(row.survived for row in report.rows)
    assert survived[0] <= report.survived <= survived[1]
    assert "of the update survived" in report.table() and "2 matrices" in report.table(most=1)


def test_refused() -> None:
    _, stored, delta = _case()
    with pytest.raises(ts_quant.OptionError, match="full-precision weight of 'm'"):
        merge_weight(stored, delta, "original", name="m")
    with pytest.raises(ts_quant.OptionError, match="another model"):
        merge_weight(stored, delta, "original", original=torch.zeros(2, 2), name="m")
    with pytest.raises(ts_quant.OptionError, match="update of 'm'"):
        merge_weight(stored, delta[:3], name="m")
    with pytest.raises(ts_quant.OptionError, match="somewhere"):
        merge_weight(stored, delta, "somewhere")
    for into in ("nf4", "dequantized", "original"):
        for factor in (float("inf"), float("nan")):
            with pytest.raises(ts_quant.NonFiniteWeightError, match="'m'"):
                merge_weight(stored, delta * factor, into, original=stored.dequantize(), name="m")
    half = ts_quant.quantize(torch.ones(4, 64, dtype=torch.float16))
    with pytest.raises(ts_quant.NonFiniteWeightError, match=r"beyond the range of .*float16"):
        merge_weight(half, torch.full((4, 64), 1e6), name="m")
