"""No recordings where the device is the slower one anyway and its memory serves the optimizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ts_core import memory_report, wrap
from ts_core.device import HostDevice
from ts_core.engine import wrapping
from ts_core.engine.replay.pace import Pace
from ts_core.engine.state_room import StateRoom
from ts_core.optim.rates import Rates
from ts_core.testing import TinyModel, TrainingRecord, tiny_model, train


class Marks:
    """A device whose compute stream gets to a point at the time that is next."""

    def __init__(self) -> None:
        self.now: float | None = 0.0

    def timestamp(self) -> Any:
        at = self.now

        def seconds_since(earlier: Any) -> float | None:
            return None if at is None or earlier.at is None else at - earlier.at

        return SimpleNamespace(at=at, seconds_since=seconds_since)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(host=0.0)
    monkeypatch.setattr("ts_core.engine.replay.pace.time.perf_counter", lambda: now.host)
    return now


def forward(pace: Pace, device: Marks, clock: Any, blocks: int, host: float, there: float) -> None:
    for index in range(blocks):
        pace.enter(index)
        clock.host += host
        if device.now is not None:
            device.now += there


def test_medians_of_blocks_that_follow_each_other(clock: SimpleNamespace) -> None:
    device = Marks()
    pace = Pace(device)  # type: ignore[arg-type]
    forward(pace, device, clock, 4, 0.001, 0.004)
    assert pace.seconds() is None  # three pairs are too few
    clock.host += 100.0  # what lies between two forwards is not of a block
    device.now = 50.0
    forward(pace, device, clock, 4, 0.001, 0.004)
    forward(pace, device, clock, 2, 0.5, 0.004)  # a forward that was watched
    assert pace.seconds() == (pytest.approx(0.001), pytest.approx(0.004))
    text = pace.device_bound()
    assert text == "the host queues a block in 1.00 ms, which takes the device 4.00"


def test_a_host_that_is_hardly_faster_may_gain_by_recordings(clock: SimpleNamespace) -> None:
    device = Marks()
    pace = Pace(device)  # type: ignore[arg-type]
    forward(pace, device, clock, 9, 0.0031, 0.004)
    assert pace.device_bound() is None
    device.now = None  # not reached yet
    late = Pace(device)  # type: ignore[arg-type]
    forward(late, device, clock, 9, 0.001, 0.004)
    assert late.seconds() is None and late.device_bound() is None


def test_state_takes_the_room_only_if_it_wants_more_and_the_device_is_the_slower() -> None:
    again: list[bool] = []
    optimizer = SimpleNamespace(split_again=lambda: again.append(True))
    session: Any = type("Session", (), {"optimizer": optimizer})()
    room = StateRoom(session, None)
    slow: Any = SimpleNamespace(device_bound=lambda: "the host is ahead")
    even: Any = SimpleNamespace(device_bound=lambda: None)
    room._wanted, room._pledged = 5000, 5000
    assert room.instead_of(slow, 1 << 30) is None
    room._pledged = 4000
    assert room.instead_of(even, 1 << 30) is None and not again
    text = room.instead_of(slow, 1 << 30)
    assert text is not None and "the host is ahead" in text and "1.00 GiB" in text
    assert again == [True]


class Accelerator(HostDevice):
    """Host memory in the role of a GPU's, with little room."""

    separate_memory = True
    limit = 0

    def usable_bytes(self) -> int | None:
        return self.limit

    def memory(self) -> dict[str, int]:
        return {"allocated": 0, "reserved": 0, "peak_allocated": 0}


def run(
    monkeypatch: pytest.MonkeyPatch, graphs: Any, bound: str | None
) -> tuple[TinyModel, TrainingRecord]:
    device = Accelerator()
    device.limit = 130 << 10  # less than all state needs
    monkeypatch.setattr(wrapping, "_device_for", lambda model, config: device)
    monkeypatch.setattr("ts_core.optim.updates.measure_rates", lambda *_: Rates(1e3, 1e3))
    monkeypatch.setattr(Pace, "device_bound", lambda self: bound)
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
        cuda_graphs=graphs,
    )
    return model, train(model, optimizer, 12)


def test_recordings_leave_their_room_to_state(
    recorders: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = "the host queues a block in 1.00 ms, which takes the device 4.00"
    model, record = run(monkeypatch, "auto", bound)
    report = memory_report(model)
    events = [line for line in report["events"] if line.startswith("cuda_graphs: off, since")]
    assert len(events) == 1 and bound in events[0] and "optimizer state" in events[0]
    assert report["replay"]["recorded"] == 0 and not report["replay"]["on"]
    for graphs, slower in ((True, bound), ("auto", None)):  # asked for, or of use
        other, same = run(monkeypatch, graphs, slower)
        assert memory_report(other)["replay"]["recorded"] > 0
        assert record.differences(same) == []
