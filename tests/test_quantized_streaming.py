"""Core and codecs together: a quantized base whose blocks stream equals the resident one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ts_core import memory_report, unwrap, wrap
from ts_core.errors import OptionError
from ts_core.testing import TrainingRecord, inject_delays, tiny_model, train

STEPS = 10


def run(
    param_offload: Any,
    quantize: str,
    *,
    delays: int | None = None,
    accumulation: int = 2,
    device: str = "host",
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> tuple[nn.Module, TrainingRecord]:
    model = tiny_model(width=32, dtype=dtype, dropout=0.1)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(trained, lr=1e-2),
        param_offload=param_offload,
        quantize=quantize,
        accumulation_steps=accumulation,
        offload=True,
        device=device,
        **options,
    )
    where = "cpu" if device == "host" else device
    if delays is None:
        record = train(model, optimizer, STEPS, accumulation=accumulation, device=where)
    else:
        with inject_delays(delays) as plan:
            record = train(model, optimizer, STEPS, accumulation=accumulation, device=where)
        assert plan.pauses > 0
    return model, record


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("param_offload", [True, 0.5])
def test_streamed_equals_resident(param_offload: Any, dtype: torch.dtype, quantize: str) -> None:
    _, resident = run(False, quantize, dtype=dtype)
    model, streamed = run(param_offload, quantize, dtype=dtype, delays=3)
    assert resident.differences(streamed) == []
    params = memory_report(model)["params"]
    assert params["quantize"] == quantize and params["quantized_blocks"] == 5
    assert params["loads"] > len(params["paged_blocks"])
    assert (resident.losses[-1] < resident.losses[0]).item()


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
@pytest.mark.parametrize("param_offload", [True, 0.5])
def test_streamed_equals_resident_on_the_gpu(param_offload: Any, quantize: str) -> None:
    _, resident = run(False, quantize, device="cuda")
    _, streamed = run(param_offload, quantize, delays=3, device="cuda")
    assert resident.differences(streamed) == []


def _dense_twin(model: nn.Module) -> nn.Module:
    """The same model holding the dequantized weights as ordinary parameters."""
    twin = tiny_model(width=32, dtype=torch.float32)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    return twin


def test_trained_on_nf4_equals_stock_training_on_the_dequantized_weights() -> None:
    model = tiny_model(width=32)
    model, optimizer = wrap(model, quantize="nf4", param_offload=True, lr=1e-3, device="host")
    twin = _dense_twin(model)
    assert not torch.equal(twin.layers[0].up.weight, tiny_model(width=32).layers[0].up.weight)
    stock = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=1e-3)
    ours = train(model, optimizer, STEPS)
    theirs = train(twin, stock, STEPS)
    for mine, other in zip(ours.losses, theirs.losses, strict=True):
        assert mine.item() == pytest.approx(other.item(), rel=1e-5)
    for name, value in ours.trained.items():
        assert (value - theirs.trained[name]).abs().max() < 1e-5


def test_state_dict_serves_dense_weights_and_loads_them() -> None:
    model, _ = wrap(tiny_model(width=32), quantize="nf4", param_offload=True, device="host")
    served = model.state_dict()
    for name, value in served.items():
        assert type(value) in (torch.Tensor, nn.Parameter), name
    assert served["layers.1.up.weight"].shape == (64, 32)
    before = served["layers.1.up.weight"].clone()
    result = model.load_state_dict({"layers.1.up.weight": before * 2}, strict=False)
    assert result.unexpected_keys == []
    after = model.state_dict()["layers.1.up.weight"]
    assert torch.equal(after, before * 2)
    unwrap(model)
    tokens = torch.randint(0, 37, (2, 7))
    assert torch.isfinite(model(tokens))


def test_auto_quantizes_only_when_nothing_else_fits() -> None:
    size = memory_report(
        wrap(tiny_model(width=32), quantize="none", param_offload=[0], device="host")[0]
    )["params"]["slot_bytes"]
    roomy, _ = wrap(tiny_model(width=32), vram_limit=size * 4, device="host")
    assert memory_report(roomy)["params"]["quantize"] is None
    tight, _ = wrap(tiny_model(width=32), vram_limit=int(size * 1.05), device="host")
    assert memory_report(tight)["params"]["quantize"] == "int8"
    assert any("int8 chosen" in line for line in tight._trainstream_session.events)


def test_explicit_codec_without_a_frozen_weight_is_refused() -> None:
    with pytest.raises(OptionError, match="no frozen linear weight"):
        wrap(tiny_model(full=True), quantize="nf4", device="host")


@pytest.mark.gpu
def test_a_limited_gpu_process_stays_under_its_limit() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    limit = torch.cuda.memory_reserved() + (1 << 30)
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(120)])
    model.requires_grad_(False)
    adapter = nn.Linear(2048, 2048)
    whole = nn.Sequential(model, adapter).bfloat16()
    whole, optimizer = wrap(
        whole,
        vram_limit=limit,
        vram_headroom=(1 << 29) / limit,
        blocks=list(model),
        quantize="none",
        device="cuda",
    )
    paged = memory_report(whole)["params"]["paged_blocks"]
    assert 0 < len(paged) <= 120
    for _ in range(3):
        out = whole(torch.randn(8, 2048, device="cuda", dtype=torch.bfloat16))
        F.mse_loss(out, torch.zeros_like(out)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert memory_report(whole)["gpu"]["peak_allocated"] <= limit
    unwrap(whole)
