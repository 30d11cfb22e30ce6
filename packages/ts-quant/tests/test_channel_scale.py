"""A factor per input channel beside the codes: values, and every operation that touches them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ts_quant
from ts_quant.codecs import channel_scale
from ts_quant.matmul import dispatch

FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("nf4", {}),
    ("nf4", {"double_quant": True}),
    ("int8", {}),
    ("fp8", {}),
    ("fp8", {"layout": "tile"}),
    ("nvfp4", {}),
    ("nvfp4", {"layout": "e4m3_div"}),
    ("mxfp4", {}),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def scaled(plain: ts_quant.QuantTensor, factors: Tensor) -> ts_quant.QuantTensor:
    """The weight with its columns multiplied, over the same buffers."""
    spec = plain.spec
    layout = {"scales": spec.scales, "block_size": spec.block_size, "rows": spec.rows}
    names = plain.__tensor_flatten__()[0]
    return ts_quant.QuantTensor.from_buffers(
        spec.codec,
        {**dict(zip(names, plain.buffers(), strict=True)), "channel_scale": factors},
        shape=plain.shape,
        dtype=plain.dtype,
        layout={**layout, "channel_scale": True},
    )


def made(
    name: str = "nvfp4",
    shape: tuple[int, ...] = (48, 96),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **options: Any,
) -> tuple[ts_quant.QuantTensor, ts_quant.QuantTensor, Tensor]:
    """(scaled weight, the same without factors, factors)."""
    plain = ts_quant.quantize(torch.randn(shape).to(device, dtype), name, **options)
    factors = torch.linspace(0.1, 4.0, shape[-1], device=device)
    return scaled(plain, factors), plain, factors


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), FORMATS, ids=str)
def test_columns_are_multiplied(
    name: str, options: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    q, plain, factors = made(name, dtype=dtype, device=device, **options)
    expected = (plain.dequantize() * factors).to(dtype)
    assert torch.equal(q.dequantize(), expected)
    assert torch.equal(q.dequantize(out=torch.empty_like(expected)), expected)
    assert q.nbytes == plain.nbytes + 4 * 96


def test_bands_of_a_large_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_scale, "_VALUES_AT_ONCE", 200)
    q, plain, factors = made(dtype=torch.bfloat16)
    assert torch.equal(q.dequantize(), (plain.dequantize() * factors).bfloat16())


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (3, 5, 32)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    q, plain, factors = made("int8", shape, torch.bfloat16)
    assert torch.equal(q.dequantize(), (plain.dequantize() * factors).bfloat16())


@pytest.mark.parametrize("device", DEVICES)
def test_every_operation_keeps_them(tmp_path: Path, device: str) -> None:
    q, _, _ = made(dtype=torch.bfloat16, device=device)
    dense = q.dequantize()
    file = ts_quant.save_quantized({"w": q}, tmp_path / "w.safetensors")
    for other in (
        q.clone(),
        q.detach(),
        copy.deepcopy(q),
        torch.nn.Parameter(q, requires_grad=False),
        ts_quant.load_quantized(file)["w"].to(device),
        q.to(torch.float32).to(torch.bfloat16),
    ):
        assert isinstance(other, ts_quant.QuantTensor) and other.spec == q.spec
        assert torch.equal(other.dequantize(), dense)
    x = torch.randn(5, 96, device=device).bfloat16().requires_grad_()
    y = torch.nn.functional.linear(x, q)
    assert torch.equal(y, torch.nn.functional.linear(x, dense))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.ones_like(y) @ dense)
    merged, _ = ts_quant.merge_weight(q, torch.ones_like(dense))
    assert torch.equal(merged, dense + 1)


def test_new_values_are_encoded_for_the_factors() -> None:
    """What AWQ gains is kept: the codes hold the new values over the factors."""
    q, _, factors = made("nvfp4", dtype=torch.bfloat16)
    new = (torch.randn(48, 96) * factors).bfloat16()
    with torch.no_grad():
        q.copy_(new)
    over = (new.float() / factors).bfloat16()
    expected = scaled(ts_quant.quantize(over, "nvfp4"), factors)
    assert torch.equal(q.dequantize(), expected.dequantize())
    assert float((q.dequantize() - new).norm() / new.norm()) < 0.12
    before = q.dequantize()
    for bad in (float("nan"), float("inf"), torch.finfo(torch.bfloat16).max):  # / 0.1 overflows
        new[5, 0] = bad
        with pytest.raises(ts_quant.NonFiniteWeightError), torch.no_grad():
            q.copy_(new)
    assert torch.equal(q.dequantize(), before)
    other, _, _ = made("nvfp4", dtype=torch.bfloat16)
    with torch.no_grad():
        q.copy_(other)
    assert torch.equal(q.dequantize(), other.dequantize())


def test_stacks_are_taken_apart() -> None:
    q, _, _ = made("int8", (4, 8, 64))
    dense = q.dequantize()
    assert q.stack_rows() == ("codes", "absmax")
    assert torch.equal(q.stack_part(1, 2).dequantize(), dense[1:3])
    assert torch.equal(q[3], dense[3])


def test_compiled_without_graph_breaks() -> None:
    torch._dynamo.reset()
    q, _, _ = made("nvfp4")

    def net(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, q).relu()

    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    leaves = [torch.linspace(-1, 1, 192).view(2, 96).requires_grad_() for _ in range(2)]
    for call, leaf in zip((net, compiled), leaves, strict=True):
        call(leaf).square().sum().backward()
    assert leaves[0].grad is not None and leaves[1].grad is not None
    assert torch.equal(leaves[0].grad, leaves[1].grad)


@pytest.mark.parametrize(("name", "layout"), [("fp8", "row"), ("nvfp4", None)])
def test_tensor_cores_leave_such_weights_to_decoding(
    name: str, layout: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_supported", lambda device, kind: True)
    q, _, _ = made(name, (64, 96), torch.bfloat16, layout=layout)
    x = torch.randn(4, 96, dtype=torch.bfloat16)
    y = torch.nn.functional.linear(x, q)
    assert torch.equal(y, torch.nn.functional.linear(x, q.dequantize()))


def test_what_is_refused() -> None:
    plain = ts_quant.quantize(torch.randn(8, 64), "int8")
    buffers = {"codes": plain.buffers()[0], "absmax": plain.buffers()[1]}
    factors = torch.ones(64)

    def build(layout: Any, shape: Any = (8, 64), **more: Tensor) -> None:
        ts_quant.QuantTensor.from_buffers(
            "int8", {**buffers, **more}, shape=shape, dtype=torch.float32, layout=layout
        )

    for layout, more, words in (
        ({"channel_scale": True}, {}, "channel_scale"),
        ({}, {"channel_scale": factors}, "channel_scale"),
        ({"channel_scale": 1}, {"channel_scale": factors}, "True or False"),
        ({"channel_scale": True}, {"channel_scale": torch.ones(63)}, "expected 64"),
        ({"channel_scale": True}, {"channel_scale": factors.half()}, "float32"),
        ({"channel_scale": True, "outliers": 2}, {"channel_scale": factors}, "without outliers"),
    ):
        with pytest.raises(ts_quant.OptionError, match=words):
            build(layout, **more)
    with pytest.raises(ts_quant.OptionError, match="a matrix or a stack"):
        build({"channel_scale": True}, (512,), channel_scale=torch.ones(512))
