"""What is computed does not follow the default device and dtype that a caller has set.

The meta device stands for a GPU here: a tensor made on it by mistake fails where it meets others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ts_quant
from ts_quant.codecs.base import _CODECS


@pytest.fixture(params=["device", "dtype"], autouse=True)
def default(request: pytest.FixtureRequest) -> Iterator[None]:
    """Another default device, or another default dtype."""
    if request.param == "device":
        with torch.device("meta"):
            yield
    else:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(before)


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("codec", sorted(_CODECS))
def test_weights(codec: str, tmp_path: Path) -> None:
    w = values(8, 64)
    for options in ({}, {"outlier_channels": [5, 2]}):
        q = ts_quant.quantize(w, codec, **options)  # type: ignore[arg-type]
        dense = q.dequantize()
        assert dense.device.type == "cpu" and dense.dtype is torch.float32
        with torch.no_grad():
            q.copy_(w)
        assert torch.equal(q.dequantize(), dense)
        x = values(2, 64).requires_grad_()
        y = torch.nn.functional.linear(x, q)
        assert torch.equal(y, torch.nn.functional.linear(x, dense))
        y.sum().backward()
        tensors = {"w": q, "nothing": values(0, 3)}
        file = ts_quant.save_quantized(tensors, tmp_path / "w.safetensors")
        found = ts_quant.load_quantized(file)
        assert torch.equal(found["w"].dequantize(), dense)
        assert found["nothing"].device.type == "cpu"
    assert ts_quant.error(w, codec).relative < 0.2


def test_starts_and_choices() -> None:
    w = values(300, 320)  # large enough to be decomposed by sampling
    start = ts_quant.loftq(w, "nf4", rank=4)
    assert start.a.device.type == "cpu" and start.a.dtype is torch.float32
    assert ts_quant.worst_channels(w, start.weight, 3).device.type == "cpu"
    storer = ts_quant.Storer("nf4", joint_budget=0.2)
    storer.measure(w, "w")
    storer.improved()
    assert storer.store(w, "w").weight.buffers()[0].device.type == "cpu"
    ts_quant.merge_weight(start.weight, w, "int8")


def test_statistics() -> None:
    layers = [torch.nn.Linear(4, 4, device="cpu", dtype=torch.float32) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    found = ts_quant.error_stats(model, [values(3, 4)], blocks=layers)
    assert all(m.device.type == "cpu" and m.dtype is torch.float32 for m in found.values())


def test_bitsandbytes_tensors() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with torch.device("cpu"):
        codes, state = functional.quantize_4bit(values(8, 64), quant_type="nf4", blocksize=64)
        tensors = {"w": codes, **{f"w.{k}": v for k, v in state.as_dict(packed=True).items()}}
    torch.set_default_dtype(before)
    plan = ts_quant.plan_reading(tensors, None, lambda name: tensors[name])
    assert plan is not None
    weight = plan.weights["w"]
    parts = {role: tensors[key] for role, key in weight.sources.items()}
    assert weight.build(parts, torch.float32).dequantize().device.type == "cpu"
