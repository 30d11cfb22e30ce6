"""The rates that wrap() plans with: measured, assumed, or said why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ts_core.config import WrapOptions
from ts_core.device import HostDevice
from ts_core.engine import planning
from ts_core.schedule import MachineProfile
from ts_core.schedule.activation_policy import BlockActivations
from ts_core.schedule.rates import TYPICAL_GPU, TYPICAL_HOST
from ts_core.testing import tiny_model


class OtherMemory(HostDevice):
    """The host device, as if it had memory of its own."""

    separate_memory = True


def rates_with(device: Any, said: list[str], **options: Any) -> Any:
    config = WrapOptions.from_keywords(options)
    machine = MachineProfile(1 << 30)
    return planning.with_rates(machine, device, config, said.append).rates  # type: ignore[arg-type]


def test_measured_assumed_or_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measure(device: Any, threads: int | None) -> Any:
        asked.append((device.usable_bytes(), threads))
        return TYPICAL_HOST

    monkeypatch.setattr(planning, "profile_hardware", measure)
    said: list[str] = []
    assert rates_with(HostDevice(), said) is None and not said and not asked
    device = OtherMemory()
    assert rates_with(device, said, threads=2, vram_limit="1GiB") is TYPICAL_HOST
    assert asked == [(None, 2)] and device.usable_bytes() == 1 << 30
    assert rates_with(device, said, profile=False) is TYPICAL_GPU
    assert len(asked) == 1 and "assumed" in said[-1] and "GB/s to the device" in said[-1]


def test_no_memory_to_measure_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 MiB\nmore")

    monkeypatch.setattr(planning, "profile_hardware", measure)
    said: list[str] = []
    assert rates_with(OtherMemory(), said) is TYPICAL_GPU
    assert "not measured, for lack of memory: CUDA out of memory" in said[0]


CPU = torch.device("cpu")


def test_work_of_a_step_from_what_was_measured() -> None:
    model = tiny_model(3, 16)
    tokens = 14
    measured = [BlockActivations(5000, 0, tokens * 16 * 4)] * 3
    work = planning.work_of(list(model.layers), measured, CPU)
    assert work is not None and work.backward == 1.0
    values = sum(p.numel() for p in model.layers[0].parameters() if p.dim() >= 2)
    assert work.block_flops == (2.0 * tokens * values,) * 3
    assert work.forward_speed == work.backward_speed == 1.0
    full = planning.work_of(list(tiny_model(3, 16, full=True).layers), measured, CPU)
    assert full is not None and full.backward == 2.0
    assert planning.work_of([nn.Linear(4, 4, bias=False)], measured[:1], CPU) is None


def test_stored_weights_say_how_fast_their_products_are() -> None:
    """Half of the values twice as fast in forward and half as fast in backward."""
    asked: list[tuple[int, torch.device]] = []

    def speeds(tokens: int, device: torch.device) -> tuple[float, float]:
        asked.append((tokens, device))
        return 2.0, 0.5

    block = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16))
    block[0].weight.product_speeds = speeds  # type: ignore[attr-defined]
    work = planning.work_of([block], [BlockActivations(5000, 0, 14 * 16 * 4)], CPU)
    assert work is not None and asked == [(14, CPU)]
    assert work.forward_speed == pytest.approx(1 / 0.75)
    assert work.backward_speed == pytest.approx(1 / 1.5)
