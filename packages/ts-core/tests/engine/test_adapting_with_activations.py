"""Blocks and activations share the room of a device that seems to have memory of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ts_core import memory_report, wrap
from ts_core.device import HostDevice
from ts_core.engine import planning, wrapping
from ts_core.engine.placement import block_leaves, model_profile
from ts_core.schedule.activation_policy import ActivationLimits, extra_device_bytes
from ts_core.schedule.rates import TYPICAL_GPU, HardwareProfile
from ts_core.testing import TinyModel, TrainingRecord, inject_delays, tiny_model, train

DEPTH = 6
TOKENS = (2, 7)


class OtherMemory(HostDevice):
    """The host device as if it had memory of its own, which a step fills as it would a GPU's."""

    separate_memory = True
    session: Any = None
    first = 0  # blocks paged at first
    other = 0  # bytes of everything but blocks, slots and activations

    def memory(self) -> dict[str, int]:
        peak = self.pool.used + self.other
        activations = None if self.session is None else self.session.activations
        if activations is not None and any(activations.block_bytes):
            measured = activations.measured
            peak += sum(block.boundary for block in measured)
            peak += max(block.saved for block in measured)
            limits = ActivationLimits(None, 0, 1, 1 << 30)
            peak += extra_device_bytes(measured, activations.policy, limits)
        return {"allocated": self.pool.used, "reserved": self.pool.used, "peak_allocated": peak}


def run(
    monkeypatch: pytest.MonkeyPatch,
    rates: HardwareProfile,
    room: float,
    steps: int,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[TinyModel, TrainingRecord, OtherMemory]:
    model = tiny_model(depth=DEPTH, dropout=0.1, dtype=dtype)
    profile = model_profile(model, block_leaves(model, list(model.layers)), 8.0, 1 << 20)
    size = profile.pageable[0]
    device = OtherMemory()
    device.other = profile.fixed_device + profile.trained
    monkeypatch.setattr(wrapping, "_device_for", lambda model, config: device)
    monkeypatch.setattr(planning, "TYPICAL_GPU", rates)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(trained, lr=1e-2),
        quantize="none",
        profile=False,
        host_arena=False,
        max_inflight_bytes=1 << 20,
        min_offload_bytes=1 << 9,
        vram_headroom=0.0,
        vram_limit=int(room * size + device.other),
        **options,
    )
    device.session = model._trainstream_session
    device.first = len(device.session.plan.paged)
    with inject_delays(3, max_ms=0.5):
        record = train(model, optimizer, steps)
    return model, record, device


@pytest.fixture(scope="module")
def plain() -> TrainingRecord:
    model = tiny_model(depth=DEPTH, dropout=0.1)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = wrap(
        model, torch.optim.AdamW(trained, lr=1e-2), device="host", param_offload=False
    )
    return train(model, optimizer, 9)


@pytest.mark.parametrize("rate", [1e3, 1e18])
@pytest.mark.parametrize("room", [6.0, 8.0, 40.0])
def test_it_settles_within_the_target_and_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, plain: TrainingRecord, rate: float, room: float
) -> None:
    rates = replace(TYPICAL_GPU, h2d=rate, d2h=rate, duplex=2 * rate)
    model, record, device = run(monkeypatch, rates, room, 9, offload=True)
    assert plain.differences(record) == []
    report = memory_report(model)
    assert device.memory()["peak_allocated"] <= report["plan"]["target_vram"]
    if room == 40.0:  # everything fits
        assert report["params"]["paged_blocks"] == []
        assert set(report["activations"]["policy"]) == {"keep"}
    if rate == 1e3 and room < 40.0:  # streaming bounds the step: blocks before activations
        assert len(report["params"]["paged_blocks"]) < device.first
        assert any("activations are known" in event for event in report["events"])


def test_when_everything_fits_the_device_optimizes_and_nothing_is_left_in_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _, _ = run(monkeypatch, TYPICAL_GPU, 60.0, 9, attention=None)
    session = model._trainstream_session
    assert session.optimizer.resident, session.events
    assert any("torch's fused AdamW from here on" in event for event in session.events)
    assert session.pager is None and not session.adapting
    for block in model.layers:
        assert "forward" not in vars(block)
        assert not (block._forward_hooks or block._forward_pre_hooks or block._backward_hooks)
    with torch.no_grad():
        before = [p.detach().clone() for p in model.parameters()]
    train(model, session.optimizer, 1)
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert changed == [p.requires_grad for p in model.parameters()]


def test_in_low_precision_the_optimizer_stays_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = run(monkeypatch, TYPICAL_GPU, 60.0, 5, torch.bfloat16)
    session = model._trainstream_session
    assert not session.optimizer.resident
    assert any("parameters are bfloat16" in event for event in session.events), session.events


def test_while_blocks_stream_the_optimizer_stays_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _, _ = run(monkeypatch, TYPICAL_GPU, 6.0, 9)
    session = model._trainstream_session
    assert not session.optimizer.resident
    assert any("blocks stream" in e for e in session.events if e.startswith("offload"))
