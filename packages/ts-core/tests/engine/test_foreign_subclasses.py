"""Frozen weights of another library's tensor subclass stream through PyTorch's flatten protocol."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ts_core import memory_report, wrap
from ts_core.testing import TinyModel, TrainingRecord, inject_delays, tiny_model, train

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchao's kernels for other machines, and torch's renamings
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")


def config(name: str) -> Any:
    if name == "int8":
        return quantization.Int8WeightOnlyConfig()
    if name == "int4":
        granularity = quantization.PerGroup(16)
        return quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=granularity)
    return quantization.Int4WeightOnlyConfig(group_size=32, int4_packing_format="tile_packed_to_4d")


def model_of(name: str, width: int, device: str = "cpu") -> TinyModel:
    """A small model whose frozen linear weights torchao stores."""
    model = tiny_model(4, width, dropout=0.1, dtype=torch.bfloat16).to(device)

    def frozen(module: nn.Module, path: str) -> bool:
        return isinstance(module, nn.Linear) and path.endswith((".up", ".down"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_(model, config(name), filter_fn=frozen)
    assert type(model.layers[0].up.weight) is not nn.Parameter
    return model


def run(name: str, share: Any, width: int = 32) -> tuple[TinyModel, TrainingRecord]:
    model = model_of(name, width)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(trained, lr=1e-2),
        param_offload=share,
        quantize="none",
        device="host",
    )
    with inject_delays(5, max_ms=2.0):
        return model, train(model, optimizer, 3)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_streamed_equals_resident(name: str) -> None:
    _, resident = run(name, False)
    for share in (True, [0, 2]):
        model, streamed = run(name, share)
        assert resident.differences(streamed) == []
        params = memory_report(model)["params"]
        assert params["loads"] > 0
        held = params["slot_bytes"]
        plain = 2 * (2 * 2 * 32 * 32 + 32 * 32)  # bf16: up, down and mix
        assert held < plain, "the stored form streams, not a decoded one"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int8", "tinygemm"])
def test_on_the_gpu(name: str) -> None:
    """Forward only for tinygemm, whose product has no gradient in torchao."""
    tokens = torch.randint(0, 37, (2, 7), generator=torch.Generator().manual_seed(3)).cuda()
    results = []
    for share in (False, True):
        model = model_of(name, 128, "cuda")
        model, optimizer = wrap(
            model, lr=1e-2, param_offload=share, quantize="none", device="cuda", offload=True
        )
        with inject_delays(5, max_ms=2.0):
            if name == "int8":
                train(model, optimizer, 2, device="cuda")
            model.eval()
            with torch.no_grad():
                results.append([model(tokens) for _ in range(3)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
