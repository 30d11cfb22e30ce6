"""More slots where loads are waited for: when, within which memory, and that no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ts_core import memory_report, wrap
from ts_core.device import HostDevice
from ts_core.engine import wrapping
from ts_core.store.load_waits import LoadWaits
from ts_core.testing import TinyModel, TrainingRecord, inject_delays, tiny_model, train

DEPTH = 4
STEPS = 15


class ClockedDevice(HostDevice):
    """Host memory in the role of a GPU's; each look at the clock moves it by `tick()`."""

    separate_memory = True
    other = 0  # bytes beside blocks and slots

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0
        self.looks = 0
        self.tick: Callable[[], float] = lambda: 1.0

    def timestamp(self) -> Any:
        self.looks += 1
        self.clock += self.tick()
        return ClockStamp(self.clock)

    def memory(self) -> dict[str, int]:
        used = self.pool.used
        return {"allocated": used, "reserved": used, "peak_allocated": used + self.other}


class ClockStamp:
    def __init__(self, at: float) -> None:
        self.at = at

    def seconds_since(self, earlier: ClockStamp) -> float | None:
        return self.at - earlier.at


def wrapped(
    monkeypatch: pytest.MonkeyPatch, room: int, full: bool = False, **options: Any
) -> tuple[TinyModel, Any, ClockedDevice]:
    """A tiny model that streams wholly, on a device with room for `room` of its blocks."""
    device = ClockedDevice()
    monkeypatch.setattr(wrapping, "_device_for", lambda model, config: device)
    model = tiny_model(depth=DEPTH, dropout=0.1, full=full)
    size = sum(p.numel() * 4 for p in model.layers[0].parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(trained, lr=1e-2),
        **{
            "param_offload": True,
            "activation_offload": False,
            "recompute": False,
            "offload": True,
            "quantize": "none",
            "profile": False,
            "check_memory": False,
            "vram_headroom": 0.0,
            "vram_limit": room * size,
            **options,
        },
    )
    return model, optimizer, device


def resident_run(full: bool, steps: int = STEPS) -> TrainingRecord:
    model = tiny_model(depth=DEPTH, dropout=0.1, full=full)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = wrap(
        model, torch.optim.AdamW(trained, lr=1e-2), device="host", param_offload=False
    )
    return train(model, optimizer, steps)


def slots_of(model: torch.nn.Module) -> int:
    session: Any = model._trainstream_session
    slots = len(session.pager.ring.slots)
    assert memory_report(model)["params"]["slots"] == slots == session.plan.slot_count
    return slots


@pytest.mark.parametrize("full", [False, True])
def test_more_slots_where_they_make_steps_faster(
    monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    model, optimizer, device = wrapped(monkeypatch, 40, full)
    session: Any = model._trainstream_session
    device.tick = lambda: 1.0 / len(session.pager.ring.slots)
    assert session.adapting and slots_of(model) == 2
    with inject_delays(1, max_ms=0.3):
        record = train(model, optimizer, STEPS)
    assert resident_run(full).differences(record) == []
    assert slots_of(model) == DEPTH and not session.adapting
    assert session.pager.stats.loads < 2 * DEPTH * STEPS
    assert sum(f"{DEPTH} slots for the {DEPTH} blocks" in event for event in session.events) == 1
    looks = device.looks
    train(model, optimizer, 2)
    assert device.looks == looks  # nothing is timed any more


def test_slots_that_make_nothing_faster_go(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, device = wrapped(monkeypatch, 40)
    session: Any = model._trainstream_session
    device.tick = lambda: float(len(session.pager.ring.slots))
    record = train(model, optimizer, STEPS)
    assert resident_run(False).differences(record) == []
    assert slots_of(model) == 2 and not session.adapting
    assert any("3 made no faster steps" in event for event in session.events)


def test_they_stay_within_half_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, device = wrapped(monkeypatch, 40)
    session: Any = model._trainstream_session
    device.tick = lambda: 1.0 / len(session.pager.ring.slots)
    target = memory_report(model)["plan"]["target_vram"]
    device.other = target - 5 * session.plan.slot_bytes  # two slots, and room for three more
    record = train(model, optimizer, STEPS)
    assert resident_run(False).differences(record) == []
    assert slots_of(model) == 3
    assert any("no room for more" in event for event in session.events)


def test_a_larger_step_takes_the_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, device = wrapped(monkeypatch, 40)
    session: Any = model._trainstream_session
    device.tick = lambda: 1.0 / len(session.pager.ring.slots)
    train(model, optimizer, STEPS)
    assert slots_of(model) == DEPTH
    device.other = device.usable_bytes() or 0
    with inject_delays(2, max_ms=0.3):
        train(model, optimizer, 3)
    assert slots_of(model) == 2 and not session.adapting


def test_a_ring_that_cannot_be_had_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's pool is fuller than the peak said."""
    model, optimizer, device = wrapped(monkeypatch, 40)
    session: Any = model._trainstream_session
    train(model, optimizer, 3)
    rest = device.pool.reserve((device.pool.limit or 0) - device.pool.used, "another's")
    monkeypatch.setattr(
        device, "memory", lambda: {"allocated": 0, "reserved": 0, "peak_allocated": 0}
    )
    train(model, optimizer, STEPS)
    assert slots_of(model) == 2 and not session.adapting
    rest.release()


def test_without_a_limit_or_memory_of_its_own_nothing_is_tried() -> None:
    model = tiny_model(depth=DEPTH)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, _ = wrap(model, torch.optim.AdamW(trained), device="host", param_offload=True)
    session: Any = model._trainstream_session
    assert session.adapter.depth is None and not session.adapting


def test_waits_are_known_once_the_device_has_passed_them() -> None:
    class Late(ClockedDevice):
        passed = 0.0

        def timestamp(self) -> Any:
            self.clock += 1.0
            return LateStamp(self, self.clock)

    class LateStamp(ClockStamp):
        def __init__(self, device: Late, at: float) -> None:
            super().__init__(at)
            self.device = device

        def seconds_since(self, earlier: ClockStamp) -> float | None:
            return None if self.at > self.device.passed else self.at - earlier.at

    device = Late()
    waits = LoadWaits(device)
    for label in (0, 1):
        for _ in range(2):
            with waits.around():
                pass
        waits.end_step(label)
    assert list(waits.finished()) == []
    device.passed = 5.0  # in the middle of the second step
    assert list(waits.finished()) == [(2.0, 0)]
    device.passed = 8.0
    assert list(waits.finished()) == [(2.0, 1)] and list(waits.finished()) == []


@pytest.mark.gpu
def test_more_slots_change_nothing_on_the_gpu() -> None:
    """Whatever the times lead to, the numbers stay, the target is kept, and it settles."""
    records = []
    for options in ({"param_offload": False}, {"param_offload": True, "vram_limit": "2GiB"}):
        model = tiny_model(depth=12, width=512, dropout=0.1)
        trained = [p for p in model.parameters() if p.requires_grad]
        model, optimizer = wrap(
            model,
            torch.optim.AdamW(trained, lr=1e-3),
            device="cuda",
            quantize="none",
            offload=True,
            activation_offload=False,
            recompute=False,
            **options,
        )
        records.append(train(model, optimizer, 40, device="cuda"))
    assert records[0].differences(records[1]) == []
    session: Any = model._trainstream_session
    assert not session.adapting and 2 <= slots_of(model) <= 12
    report = memory_report(model)
    assert report["gpu"]["peak_allocated"] <= report["plan"]["target_vram"]
