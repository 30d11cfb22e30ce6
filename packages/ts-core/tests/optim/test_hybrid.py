"""The split between device memory, link and host threads: a pure function, and its use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ts_core import OffloadAdamW, wrap
from ts_core.device.host import HostDevice
from ts_core.optim.hybrid import HOST_SHARE_BESIDE_LINK, HybridSplit, Piece, Rates, split
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine

RATES = Rates(host=4.0e9, link=45e9)
MILLION = 1_000_000


def pieces(*millions: float, low: bool = False) -> list[Piece]:
    return [Piece(int(m * MILLION), int(m * MILLION) * (2 if low else 4), low) for m in millions]


@pytest.mark.parametrize(
    ("millions", "room_mb", "keeps", "expected"),
    [
        ((100,), 0, False, {"host": 1}),
        ((100, 50), 1200, False, {"resident": 2}),
        ((100, 50), 900, False, {"resident": 1, "streamed": 1}),
        ((100, 50), 900, True, {"streamed": 1, "host": 1}),
        ((100,) * 15, 110, False, {"host": 5, "streamed": 10}),
        ((100,) * 15, 90, False, {"host": 15}),  # no room for the ring
        ((100,) * 15, 8 * 400 + 110, False, {"resident": 4, "host": 4, "streamed": 7}),
    ],
)
def test_split(
    millions: tuple[float, ...], room_mb: int, keeps: bool, expected: dict[str, int]
) -> None:
    found = split(
        pieces(*millions),
        RATES,
        room_mb * MILLION,
        keeps_gradients=keeps,
        ring_bytes=100 * MILLION,
    )
    counts = {place: found.places.count(place) for place in set(found.places)}
    assert counts == expected


def test_sides_finish_together_and_sooner_than_either_alone() -> None:
    many = pieces(*[10] * 150)
    found = split(many, RATES, 5 * 10**9, keeps_gradients=True, ring_bytes=0)
    assert "streamed" in found.places and "host" in found.places
    assert abs(found.host_s - found.link_s) < 0.1 * found.host_s
    values = 150 * 10 * MILLION
    assert max(found.host_s, found.link_s) < 0.9 * min(values / RATES.host, values * 8 / RATES.link)


def test_a_slow_link_leaves_all_to_the_host_and_a_slow_host_all_to_the_link() -> None:
    many = pieces(*[10] * 20)
    slow_link = split(many, Rates(4e9, 1e9), 10**9, keeps_gradients=False, ring_bytes=0)
    slow_host = split(many, Rates(1e7, 45e9), 10**9, keeps_gradients=False, ring_bytes=0)
    assert set(slow_link.places) <= {"host", "resident"}
    assert slow_host.places.count("host") <= 1


def test_room_counts_gradients_that_wait_and_master_copies() -> None:
    one = pieces(100, low=True)
    need = 100 * MILLION * (12 + 2)
    for room, place in ((need, "resident"), (need - 1, "host")):
        found = split(one, RATES, room, keeps_gradients=True, ring_bytes=10 * need)
        assert found.places == (place,)


class Roomy(HostDevice):
    """A host device with a link, device memory and a limit."""

    separate_memory = True

    def usable_bytes(self) -> int:
        return 1 << 20


def test_optimizer_splits_after_two_steps_says_so_and_stays_exact(lab: Any) -> None:
    lines: list[str] = []
    ours, theirs = lab.model(), lab.model()
    device = Roomy()
    optimizer = OffloadAdamW(
        ours.parameters(),
        lr=1e-2,
        mode="hybrid",
        chunk_elems=4096,
        device=device,
        copies=CopyEngine(device),
        on_event=lines.append,
    )
    with inject_delays(3, max_ms=1.0, share=0.3):
        lab.run(ours, optimizer, 9)
        optimizer.synchronize()
    lab.run(theirs, OffloadAdamW(theirs.parameters(), lr=1e-2), 9)
    assert lab.distance(ours, theirs) == 0.0
    splits = [line for line in lines if line.startswith("optimizer split")]
    assert splits and "G values/s" in splits[0]
    places = optimizer.stats()["values_by_place"]
    assert set(places) - {"host"}


def test_a_host_that_takes_longer_than_planned_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [torch.nn.Parameter(torch.zeros(600, 1000)) for _ in range(24)]
    device = Roomy()
    lines: list[str] = []
    copies = CopyEngine(device, max_inflight_bytes=1 << 20)
    optimizer = OffloadAdamW(params, device=device, copies=copies, chunk_elems=1 << 16)
    optimizer.build()
    control = HybridSplit(
        device, CopyEngine(device), optimizer._storage.arena, lambda: 10**8, lines.append
    )
    monkeypatch.setattr(control, "_measure_link", lambda: 45e6)

    def steps(count: int, seconds_per_bucket: float) -> None:
        for _ in range(count):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
            optimizer.synchronize()
            for bucket in optimizer.buckets:
                bucket.place.seconds = seconds_per_bucket
            control.after_step(optimizer)

    # Room for no state at all beyond the ring, so host and link share the work.
    monkeypatch.setattr(control, "_room", lambda: optimizer.streaming_bytes)
    steps(2, 0.6 / 4)
    before = optimizer.stats()["values_by_place"]
    assert {"streamed", "host"} == set(before)
    steps(2, 10 * 0.6 / 4)
    after = optimizer.stats()["values_by_place"]
    assert after.get("host", 0) < before["host"]
    assert any("measured again" in line for line in lines)
    assert 0 < HOST_SHARE_BESIDE_LINK < 1


@pytest.mark.parametrize("mode", ["auto", "hybrid", "gpu"])
def test_wrap_takes_every_mode(lab: Any, mode: str) -> None:
    model, twin = lab.model(), lab.model()
    model, optimizer = wrap(model, optimizer_mode=mode, lr=1e-2, device="cpu")
    assert optimizer.mode == mode
    lab.run(model, optimizer, 3)
    lab.run(twin, OffloadAdamW(twin.parameters(), lr=1e-2), 3)
    assert lab.distance(model, twin) == 0.0
