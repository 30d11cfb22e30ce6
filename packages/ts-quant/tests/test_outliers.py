"""Outlier channels beside the codes: values, every operation that touches them, and the choice."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ts_quant
from ts_quant.matmul import dispatch
from ts_quant.outliers import channel_gains

FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("nf4", {}),
    ("nf4", {"double_quant": True}),
    ("int8", {}),
    ("fp8", {}),
    ("fp8", {"layout": "row"}),
    ("fp8", {"layout": "tile"}),
    ("nvfp4", {}),
    ("mxfp4", {}),
]
CHANNELS = [3, 17, 40]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def planted(n_out: int = 48, n_in: int = 96, dtype: torch.dtype = torch.float32) -> Tensor:
    """A matrix whose CHANNELS are thirty times as large as the rest."""
    w = torch.randn(n_out, n_in)
    w[:, CHANNELS] *= 30
    return w.to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "options"), FORMATS, ids=str)
def test_the_columns_are_bf16_and_the_rest_is_stored_without_them(
    name: str, options: dict[str, Any], device: str
) -> None:
    w = planted().to(device)
    q = ts_quant.quantize(w, name, outlier_channels=[40, 3, 17], **options)
    rest = w.index_fill(1, torch.tensor(CHANNELS, device=device), 0.0)
    alone = ts_quant.quantize(rest, name, **options)
    expected = alone.dequantize()
    expected[:, CHANNELS] = w[:, CHANNELS].bfloat16().float()
    assert torch.equal(q.dequantize(), expected)
    assert q.nbytes == alone.nbytes + 2 * 3 * 48 + 8 * 3 and q.spec.outliers == 3
    out = torch.empty_like(w, dtype=torch.bfloat16)
    assert torch.equal(q.dequantize(out=out), q.dequantize(torch.bfloat16))
    plain = ts_quant.quantize(w, name, **options).dequantize()
    assert float((q.dequantize() - w).norm()) < 0.5 * float((plain - w).norm())


def test_every_operation_keeps_them(tmp_path: Path) -> None:
    w = planted(dtype=torch.bfloat16)
    q = ts_quant.quantize(w, "nf4", outlier_channels=CHANNELS)
    dense = q.dequantize()
    file = ts_quant.save_quantized({"w": q}, tmp_path / "w.safetensors")
    for other in (
        q.clone(),
        q.detach(),
        copy.deepcopy(q),
        torch.nn.Parameter(q, requires_grad=False),
        ts_quant.load_quantized(file)["w"],
        q.to(torch.float32).to(torch.bfloat16),
    ):
        assert isinstance(other, ts_quant.QuantTensor) and other.spec == q.spec
        assert torch.equal(other.dequantize(), dense)
    x = torch.randn(5, 96, dtype=torch.bfloat16, requires_grad=True)
    y = torch.nn.functional.linear(x, q)
    assert torch.equal(y, torch.nn.functional.linear(x, dense))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.ones_like(y) @ dense)
    new = planted(dtype=torch.bfloat16) * 2
    with torch.no_grad():
        q.copy_(new)
    expected = ts_quant.quantize(new, "nf4", outlier_channels=CHANNELS)
    assert torch.equal(q.dequantize(), expected.dequantize())
    for bad in (float("nan"), float("inf")):
        new[5, CHANNELS[1]] = bad
        with pytest.raises(ts_quant.NonFiniteWeightError), torch.no_grad():
            q.copy_(new)
    assert torch.equal(q.dequantize(), expected.dequantize())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["nf4", "int8", "fp8", "nvfp4", "mxfp4"])
def test_the_largest_values_of_a_dtype_stay_finite(name: str, dtype: torch.dtype) -> None:
    """bf16 has no neighbour of fp16's largest value that fp16 can hold but the one below it."""
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    w = torch.randn(8, 64).to(dtype)
    w[:, 5], w[::2, 5] = largest, -largest
    decoded = ts_quant.quantize(w, name, outlier_channels=[5]).dequantize()
    assert decoded.isfinite().all()
    error = (decoded[:, 5].double() - w[:, 5].double()).abs() / largest
    assert error.max() <= 2.0**-8
    again = ts_quant.quantize(decoded, name, outlier_channels=[5]).dequantize()
    assert torch.equal(again[:, 5], decoded[:, 5])


def test_compiled_without_graph_breaks() -> None:
    torch._dynamo.reset()
    q = ts_quant.quantize(planted(), "int8", outlier_channels=CHANNELS)

    def net(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, q).relu()

    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    leaves = [torch.linspace(-1, 1, 192).view(2, 96).requires_grad_() for _ in range(2)]
    for call, leaf in zip((net, compiled), leaves, strict=True):
        call(leaf).square().sum().backward()
    assert leaves[0].grad is not None and leaves[1].grad is not None
    assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_nvfp4_tensor_cores_leave_such_weights_to_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of FP8 take them: tests/matmul."""
    monkeypatch.setattr(dispatch, "_supported", lambda device, kind: True)
    q = ts_quant.quantize(planted(64, 96, torch.bfloat16), "nvfp4", outlier_channels=CHANNELS)
    x = torch.randn(4, 96, dtype=torch.bfloat16)
    y = torch.nn.functional.linear(x, q)
    assert torch.equal(y, torch.nn.functional.linear(x, q.dequantize()))


def test_what_is_refused(tmp_path: Path) -> None:
    w = planted()
    for bad in ([96], [-1], [3, 3], [[1]], [0.5], [True]):
        with pytest.raises(ts_quant.OptionError, match="outlier_channels"):
            ts_quant.quantize(w, "nf4", outlier_channels=bad)  # type: ignore[arg-type]
    with pytest.raises(ts_quant.OptionError, match="columns of a matrix"):
        ts_quant.quantize(torch.randn(4, 4, 4), "nf4", outlier_channels=[0])
    assert ts_quant.quantize(w, "nf4", outlier_channels=[]).spec.outliers == 0
    w[0, 3] = float("nan")
    with pytest.raises(ts_quant.NonFiniteWeightError, match="'w'"):
        ts_quant.quantize(w, "nf4", outlier_channels=CHANNELS, name="w")
    q = ts_quant.quantize(planted(), "nf4", outlier_channels=CHANNELS)
    for channels in ([3, 17, 96], [3, 3, 17], [-1, 3, 17]):
        q.buffers()[-1].copy_(torch.tensor(channels))
        file = ts_quant.save_quantized({"w": q}, tmp_path / "w.safetensors")
        with pytest.raises(ts_quant.CheckpointError, match="distinct column numbers"):
            ts_quant.load_quantized(file)
    buffers = dict(zip(q.__tensor_flatten__()[0], q.buffers(), strict=True))
    for outliers in (2, 97, -1, True):
        with pytest.raises(ts_quant.OptionError):
            ts_quant.QuantTensor.from_buffers(
                "nf4", buffers, shape=(48, 96), dtype=w.dtype, layout={"outliers": outliers}
            )


@pytest.mark.parametrize("name", ["nf4", "int8", "fp8", "nvfp4"])
@pytest.mark.parametrize("n_in", [96, 90])  # 90: blocks cross rows
def test_the_channels_worth_keeping_are_found(name: str, n_in: int) -> None:
    w = planted(48, n_in)
    found = ts_quant.worst_channels(w, ts_quant.quantize(w, name), 3)
    assert sorted(found.tolist()) == CHANNELS
    q = ts_quant.quantize(w, name)
    even = channel_gains(w, q, torch.full((n_in,), 4.0))
    torch.testing.assert_close(even, 4 * channel_gains(w, q))
    silent = torch.ones(n_in)
    silent[CHANNELS] = 0  # never used: their own errors cost nothing, those of others remain
    assert bool((channel_gains(w, q, silent) < channel_gains(w, q))[CHANNELS].all())


def test_gains_are_near_what_encoding_finds() -> None:
    w = torch.randn(64, 128)
    w[:, 7] *= 10
    plain = ts_quant.quantize(w, "nf4")

    def lost(q: ts_quant.QuantTensor) -> float:
        return float((q.dequantize() - w).square().sum())

    gains = channel_gains(w, plain)
    real = lost(plain) - lost(ts_quant.quantize(w, "nf4", outlier_channels=[7]))
    assert float(gains[7]) == pytest.approx(real, rel=0.3)


def test_of_fp8_only_the_errors_of_a_column_itself_count() -> None:
    """The steps of e4m3 codes are a share of each value, not of its block's largest."""
    w = torch.randn(64, 128)
    w[:, 7] *= 10
    plain = ts_quant.quantize(w, "fp8")
    moments = torch.rand(128) + 0.1
    errors = (plain.dequantize() - w).double().square() * moments.double()
    torch.testing.assert_close(channel_gains(w, plain, moments), errors.sum(0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["fp8", "nf4"])
def test_a_storer_keeps_a_share_of_the_channels(name: str) -> None:
    w = torch.randn(48, 128)
    moments = torch.ones(128)
    moments[[9, 70, 101]] = 1e4
    storer = ts_quant.Storer(name, outlier_channels=0.02, second_moments={"layer": moments})
    assert not storer.needs_measuring
    q = storer.store(w, "layer.weight").weight
    assert q.spec.outliers == 3  # 2.56, rounded up
    assert q.buffers()[-1].tolist() == [9, 70, 101]
    row = storer.report.rows["layer.weight"]
    assert row.outliers == 3 and row.reason == "2.00% of the input channels in bf16"
    plain = ts_quant.Storer(name, second_moments={"layer": moments})
    plain.store(w, "layer.weight")
    before, after = plain.report.rows["layer.weight"].error, row.error
    assert after < 0.2 * before
    both = ts_quant.Storer(name, outlier_channels=0.02, error_rank=4)
    kept = both.store(w, "layer.weight")
    assert kept.weight.spec.outliers == 3 and kept.start is not None
    assert kept.start.a.shape == (4, 128)
    bias = torch.randn(2, 8, 128)  # a stack has no columns to keep
    assert storer.store(bias, "layer.weight").weight.spec.outliers == 0


def test_what_a_storer_refuses() -> None:
    for bad in (-0.1, 0.2, True, "auto", None):
        with pytest.raises(ts_quant.OptionError, match="outlier_channels="):
            ts_quant.Storer("fp8", outlier_channels=bad)  # type: ignore[arg-type]
    with pytest.raises(ts_quant.OptionError, match="joint_budget"):
        ts_quant.Storer("fp8", outlier_channels=0.01, joint_budget=0.1)


def test_precision_outliers_and_rank_compete_for_one_budget() -> None:
    torch.manual_seed(0)
    heavy = torch.randn(64, 128) * (1 + 20 * (torch.rand(64, 128) < 0.02))
    low = torch.randn(64, 2) @ torch.randn(2, 128) * 4 + torch.sign(torch.randn(64, 128))
    weights = {"heavy.weight": heavy, "low.weight": low, "channels.weight": planted(64, 128)}
    for index in range(3):
        weights[f"plain{index}.weight"] = torch.randn(64, 128) * 0.05
    storer = ts_quant.Storer("nf4", joint_budget=0.3)
    for name, weight in weights.items():
        storer.measure(weight, name)
    storer.improved()
    found = {name: storer.store(weight, name) for name, weight in weights.items()}
    rows = storer.report.rows
    assert rows["channels.weight"].outliers >= 3 and "outlier channels" in (
        rows["channels.weight"].reason
    )
    plain = sum(ts_quant.quantize(w, "nf4").nbytes for w in weights.values())
    factors = sum(2 * s.start.a.shape[0] * (64 + 128) for s in found.values() if s.start)
    assert storer.report.stored_bytes + factors <= plain * 1.3
    chosen = {(row.codec, row.outliers > 0, row.rank > 0) for row in rows.values()}
    assert len(chosen) >= 3  # several forms won
    for name, row in rows.items():
        exact, stored = weights[name], found[name]
        near = stored.weight.dequantize()
        assert row.error == pytest.approx(float((near - exact).norm() / exact.norm()), rel=1e-3)
        left = row.error
        if stored.start is not None:
            near = near + stored.start.b.float() @ stored.start.a.float()
            left = row.error_with_start
            measured = float((near - exact).norm() / exact.norm())
            assert left == pytest.approx(measured, rel=2e-2)
        spent = {c.form: c for c in row.considered}
        assert spent["plain"].extra_bytes == 0 and len(spent) == len(row.considered) >= 10
        assert any(c.error == pytest.approx(left, rel=2e-2) for c in row.considered)
    matrices = json.loads(storer.report.to_json())["matrices"]
    assert matrices[2]["outliers"] == rows["channels.weight"].outliers
    assert matrices[0]["considered"][0] == {
        "form": "plain",
        "extra_bytes": 0,
        "error": rows["heavy.weight"].considered[0].error,
    }


def test_outliers_with_a_start_beside_them_and_none_for_layers_without_adapter() -> None:
    torch.manual_seed(0)
    w = planted(64, 128) + torch.randn(64, 2) @ torch.randn(2, 128) * 3
    storer = ts_quant.Storer("nf4", joint_budget=0.5, error_rank=16)
    storer.measure(w, "a.weight")
    storer.measure(w, "b.weight", adapted=False)
    assert not any("rank" in f.label for f in storer._options["b.weight"])
    both = [f for f in storer._options["a.weight"] if f.outliers and f.rank]
    assert {f.rank for f in both} == {4, 8, 16}
    storer.improved()
    assert storer._chosen is not None
    storer._chosen["a.weight"] = both[-1]
    stored = storer.store(w, "a.weight")
    assert stored.start is not None and stored.weight.spec.outliers == both[-1].outliers
    near = stored.weight.dequantize() + stored.start.b @ stored.start.a
    relative = float((near - w).norm() / w.norm())
    assert relative == pytest.approx(both[-1].error ** 0.5, rel=1e-3)
    assert storer.report.rows["a.weight"].error_with_start == pytest.approx(relative, rel=1e-3)
