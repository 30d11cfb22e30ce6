"""Room that activations leave to the state of a split optimizer."""

from __future__ import annotations

import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ts_core import memory_report, wrap
from ts_core.device import HostDevice
from ts_core.engine import wrapping
from ts_core.engine.state_room import StateRoom, worth
from ts_core.optim import layout
from ts_core.optim.rates import Rates
from ts_core.schedule.activation_policy import BlockActivations
from ts_core.schedule.plan import Work
from ts_core.schedule.rates import TYPICAL_GPU
from ts_core.testing import TinyModel, TrainingRecord, tiny_model, train

GB = 10**9


@pytest.mark.parametrize(
    ("seconds", "saved", "expected"),
    [
        (0.2, 3 * GB, 12 * GB),  # 17 ms per GB of state, 10 per GB of activations
        (0.2, GB, 0),  # 30 ms per GB of activations
        (0.08, 10 * GB, 0),  # behind the 90 ms of a step's products
        (0.2, 0, 0),
    ],
)
def test_the_state_is_worth_its_room_where_updates_are_waited_for(
    seconds: float, saved: int, expected: int
) -> None:
    measured = [BlockActivations(saved // 10 + 5, 0, 5)] * 10
    work = Work(block_flops=(3e11,) * 10, backward=2.0)  # 30 ms of forward at 100 TFLOP/s
    assert worth(12 * GB, seconds, measured, work, 1e14) == expected


def test_what_was_pledged_goes_down_as_state_arrives() -> None:
    taken = [100]
    optimizer = SimpleNamespace(state_away=lambda: (5000, 1e9), state_on_device=lambda: taken[0])
    said: list[str] = []
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    session: Any = SimpleNamespace(
        optimizer=optimizer, blocks=[block], log=said.append, device=HostDevice()
    )
    session = type("Session", (), vars(session))()
    room = StateRoom(session, None)
    assert room() == 0
    measured = [BlockActivations(4096, 0, 320)]
    assert room.forward_s == 0.0
    assert room.pledge(measured, 3000) == room() == 3000
    tokens = 320 / (8 * 4)
    assert room.forward_s == 2 * tokens * 8 * 8 / TYPICAL_GPU.matmul_bf16
    assert len(said) == 1 and "for optimizer state" in said[0]
    taken[0] = 1100
    assert room() == 2000
    taken[0] = 9000
    assert room() == 0
    optimizer.state_away = lambda: None  # no split
    assert room.pledge(measured, 3000) == room() == 0
    room.forward_s = 0.0
    assert room.pledge(measured, -1) == 0
    assert room.forward_s > 0.0  # known where there is no room, too


class Accelerator(HostDevice):
    """Host memory in the role of a GPU's, with little room."""

    separate_memory = True
    limit = 0

    def usable_bytes(self) -> int | None:
        return self.limit

    def memory(self) -> dict[str, int]:
        return {"allocated": 0, "reserved": 0, "peak_allocated": 0}


def run(monkeypatch: pytest.MonkeyPatch, limit: int) -> tuple[TinyModel, TrainingRecord]:
    device = Accelerator()
    device.limit = limit
    monkeypatch.setattr(wrapping, "_device_for", lambda model, config: device)
    monkeypatch.setattr("ts_core.optim.updates.measure_rates", lambda *_: Rates(1e3, 1e3))
    model = tiny_model(4, full=True)
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        quantize="none",
        param_offload=False,
        offload=True,
        optimizer_mode="hybrid",
        check_memory=False,
        profile=False,
    )
    return model, train(model, optimizer, 6)


def test_blocks_are_recomputed_for_the_sake_of_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """All activations would fit, and so would all state, but not both."""
    model, record = run(monkeypatch, 1 << 30)
    report = memory_report(model)
    assert report["activations"]["policy"].count("keep") == 4
    kept = sum(report["activations"]["block_bytes"])
    state = 8 * sum(p.numel() for p in model.parameters())
    small, little = run(monkeypatch, int((state + kept / 2) / 0.9))
    events = memory_report(small)["events"]
    assert any("of room are for optimizer state" in line for line in events), "\n".join(events)
    assert memory_report(small)["activations"]["policy"].count("recompute") >= 2
    assert record.differences(little) == []


def test_no_gradient_of_the_last_step_is_kept_into_a_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Backward is when a step takes most memory."""
    device = Accelerator()
    device.limit = 1 << 30
    monkeypatch.setattr(wrapping, "_device_for", lambda model, config: device)
    monkeypatch.setattr(layout, "SMALL_BYTES", 0)  # a bucket of its own for each
    model, optimizer = wrap(
        tiny_model(2, full=True),
        lr=1e-2,
        quantize="none",
        param_offload=False,
        offload=True,
        optimizer_mode="gpu",
        max_grad_norm=1.0,
        profile=False,
        activation_offload=False,
        recompute=False,
    )
    found: list[weakref.ref[Any]] = []
    for param in model.parameters():
        param.register_hook(lambda grad: found.append(weakref.ref(grad.untyped_storage())))
    tokens = torch.arange(14).view(2, 7)
    streams = [optimizer._updates.storage.device_work().stream(link) for link in (False, True)]
    for _ in range(3):
        loss = model(tokens)
        assert not any(memory() is not None for memory in found)
        loss.backward()
        for stream in streams:
            stream.submit(lambda: time.sleep(0.05))  # type: ignore[attr-defined]
        optimizer.step()
    optimizer.synchronize()
    assert len(found) > 3 * 20


class Crowded(Accelerator):
    """A step takes what blocks, state and `other` take."""

    other = 0
    optimizer: Any = None

    def memory(self) -> dict[str, int]:
        state = 0 if self.optimizer is None else self.optimizer.state_on_device()
        return {"allocated": 0, "reserved": 0, "peak_allocated": self.other + state}


def test_split_state_leaves_before_blocks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that stream would only make room for more of it, step after step."""
    device = Crowded()
    device.limit = 1 << 20
    monkeypatch.setattr(wrapping, "_device_for", lambda model, config: device)
    monkeypatch.setattr("ts_core.optim.updates.measure_rates", lambda *_: Rates(1e3, 1e3))
    model, optimizer = wrap(
        tiny_model(4, full=True),
        lr=1e-2,
        quantize="none",
        offload=True,
        optimizer_mode="hybrid",
        profile=False,
        activation_offload=False,
        recompute=False,
        accumulation_steps=2,
    )
    device.optimizer = optimizer
    train(model, optimizer, 4, accumulation=2)
    session = model._trainstream_session
    state = optimizer.state_on_device()
    assert state > 0 and session.plan.paged == ()
    device.other = int(0.9 * device.limit) - state // 2  # something grew
    record = train(model, optimizer, 6, accumulation=2)
    assert optimizer.state_on_device() <= state // 2
    assert session.plan.paged == ()
    assert all(loss.isfinite() for loss in record.losses)
