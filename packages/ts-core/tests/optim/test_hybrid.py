"""The split between device memory, link and host threads: a pure function, and its use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ts_core import OffloadAdamW, wrap
from ts_core.device.host import HostDevice
from ts_core.memory.arena import default_arena
from ts_core.optim.hybrid import HybridSplit, Piece, split
from ts_core.optim.rates import Rates, measure_rates
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine

RATES = Rates(host=4.0e9, link=45e9)
MILLION = 1_000_000


def pieces(*millions: float, low: bool = False) -> list[Piece]:
    return [Piece(int(m * MILLION), int(m * MILLION) * (2 if low else 4), low) for m in millions]


@pytest.mark.parametrize(
    ("millions", "room_mb", "expected"),
    [
        ((100, 50), 1200, {"resident": 2}),
        ((100, 50), 900, {"resident": 1, "zero_copy": 1}),  # 8.9 ms of link; host: 12.5
        ((100,) * 15, 3300, {"resident": 4, "host": 4, "zero_copy": 7}),
        ((100,) * 15, 0, {"host": 6, "zero_copy": 9}),
    ],
)
def test_split(millions: tuple[float, ...], room_mb: int, expected: dict[str, int]) -> None:
    found = split(pieces(*millions), RATES, room_mb * MILLION)
    assert {place: found.places.count(place) for place in set(found.places)} == expected


def test_sides_finish_together_and_sooner_than_either_alone() -> None:
    found = split(pieces(*[10] * 150), RATES, 0)
    assert abs(found.host_s - found.link_s) < 0.1 * found.host_s
    values = 150 * 10 * MILLION
    assert found.seconds < 0.95 * min(values / RATES.host, values * 8 / RATES.link)
    places = "".join(place[0] for place in found.places)
    assert "hhhh" not in places  # spread through the stack


def test_a_slow_link_leaves_all_to_the_host_and_a_slow_host_all_to_the_link() -> None:
    many = pieces(*[10] * 20)
    assert set(split(many, Rates(4e9, 1e9), 0).places) == {"host"}
    assert set(split(many, Rates(1e7, 45e9), 0).places) == {"zero_copy"}


def test_room_counts_master_copies() -> None:
    one = pieces(100, low=True)
    for room, resident in ((1200 * MILLION, True), (1200 * MILLION - 1, False)):
        assert (split(one, RATES, room).places == ("resident",)) == resident


def test_rates_are_measured() -> None:
    device = HostDevice()
    rates = measure_rates(CopyEngine(device), default_arena(), 1)
    assert 1e7 < rates.host < 1e11 and 1e7 < rates.link < 1e13


class Roomy(HostDevice):
    """A host device with a link, device memory and a limit."""

    separate_memory = True

    def usable_bytes(self) -> int:
        return 1 << 20


def hybrid_on(params: Any, rates: Rates, lines: list[str], **options: Any) -> OffloadAdamW:
    device = Roomy()
    optimizer = OffloadAdamW(
        params, mode="hybrid", device=device, copies=CopyEngine(device), **options
    )
    optimizer.build()
    updates = optimizer._updates
    updates.split = HybridSplit(device, lambda: rates, updates.room_bytes, lines.append)
    return optimizer


@pytest.mark.parametrize("clip", [None, 0.05])
def test_optimizer_splits_after_two_steps_says_so_and_stays_exact(
    lab: Any, clip: float | None
) -> None:
    lines: list[str] = []
    ours, theirs = lab.model(), lab.model()
    optimizer = hybrid_on(
        ours.parameters(), Rates(4e9, 45e9), lines, lr=1e-2, max_grad_norm=clip, chunk_elems=4096
    )
    assert set(optimizer.stats()["values_by_place"]) == {"zero_copy"}
    with inject_delays(3, max_ms=1.0, share=0.3):
        lab.run(ours, optimizer, 9)
        optimizer.synchronize()
    lab.run(theirs, OffloadAdamW(theirs.parameters(), lr=1e-2, max_grad_norm=clip), 9)
    # With clipping the norm is summed on the device here, on the host there.
    assert lab.distance(ours, theirs) <= (0.0 if clip is None else 3e-7)
    assert lines and all(line.startswith("optimizer split") for line in lines)
    assert "G values/s" in lines[0]
    assert len(optimizer.stats()["values_by_place"]) > 1


def test_a_host_that_takes_longer_than_planned_gets_less() -> None:
    params = [torch.nn.Parameter(torch.zeros(600, 1000)) for _ in range(24)]
    lines: list[str] = []
    optimizer = hybrid_on(params, Rates(4e6, 45e6), lines)
    optimizer.headroom = 1.0  # no room for state

    def steps(count: int, seconds_per_bucket: float) -> None:
        for _ in range(count):
            for param in params:
                param.grad = torch.ones_like(param)
            for bucket in optimizer.buckets:
                bucket.place.seconds = seconds_per_bucket
            place = type(optimizer.buckets[0].place)
            assert place is not None
            optimizer.step()

    steps(2, 0.0)
    before = optimizer.stats()["values_by_place"]
    assert set(before) == {"zero_copy", "host"}
    # Host updates of this size take no time here, so the host is given more.
    steps(2, 0.0)
    after = optimizer.stats()["values_by_place"]
    assert after["host"] > before["host"]
    assert "host threads took" in lines[-1]


def test_state_goes_back_when_a_step_took_too_much(lab: Any) -> None:
    lines: list[str] = []
    ours, theirs = lab.model(), lab.model()
    optimizer = hybrid_on(ours.parameters(), Rates(4e9, 45e9), lines, lr=1e-2, chunk_elems=4096)
    assert not optimizer.give_state_back(100)  # none is there
    lab.run(ours, optimizer, 3)
    here = optimizer.state_on_device()
    assert here > 0
    assert not optimizer.give_state_back(0) and optimizer.state_on_device() == here
    assert optimizer.give_state_back(here // 2)
    assert optimizer.state_on_device() <= here - here // 2
    assert "took too much memory" in lines[-1]
    room = optimizer._updates.room_bytes()
    optimizer.leave_room_for(lambda: 1000)
    assert optimizer._updates.room_bytes() == room - 1000
    lab.run(ours, optimizer, 1)
    optimizer.synchronize()
    other = OffloadAdamW(theirs.parameters(), lr=1e-2)
    lab.run(theirs, other, 3)
    lab.run(theirs, other, 1)
    assert lab.distance(ours, theirs) == 0.0


@pytest.mark.parametrize("mode", ["auto", "hybrid", "gpu"])
def test_wrap_takes_every_mode(lab: Any, mode: str) -> None:
    model, twin = lab.model(), lab.model()
    model, optimizer = wrap(model, optimizer_mode=mode, lr=1e-2, device="cpu")
    assert optimizer.mode == mode
    lab.run(model, optimizer, 3)
    lab.run(twin, OffloadAdamW(twin.parameters(), lr=1e-2), 3)
    assert lab.distance(model, twin) == 0.0
