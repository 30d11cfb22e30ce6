"""State of which the device updates one part and host threads the other."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from ts_core import OffloadAdamW
from ts_core.device.host import HostDevice
from ts_core.optim import hybrid
from ts_core.optim.hybrid import HybridSplit
from ts_core.optim.pieces import NOTHING, Bytes, Piece
from ts_core.optim.rates import Rates
from ts_core.optim.shared_place import SharedPlace
from ts_core.optim.split import in_words, link_share, split, timed
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine

MILLION = 10**6


class SeparateHost(HostDevice):
    separate_memory = True

    def usable_bytes(self) -> int:
        return 1 << 40


def optimizer_of(params: list[torch.nn.Parameter], **options: Any) -> OffloadAdamW:
    device = SeparateHost()
    return OffloadAdamW(params, device=device, copies=CopyEngine(device), **options)


def run(optimizer: OffloadAdamW, params: list[torch.nn.Parameter], steps: int) -> None:
    torch.manual_seed(3)
    for _ in range(steps):
        for param in reversed(params):
            param.grad = torch.randn(param.shape).to(param.dtype)
            if optimizer.__class__ is OffloadAdamW:
                optimizer._on_gradient(param)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("share", [(0.1, 0.0), (0.5, 0.0), (0.77, 0.0), (0.5, 0.3), (0.3, 0.9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"eager": False}, {"max_grad_norm": 0.5}], ids=str)
def test_the_parts_make_the_whole(
    share: tuple[float, float], dtype: torch.dtype, options: Any
) -> None:
    sizes = [(601, 1003), (257, 64), (90_001,)]
    results = []
    for place in ("host", "shared"):
        torch.manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]
        optimizer = optimizer_of(params, lr=0.01, weight_decay=0.1, chunk_elems=4096, **options)
        optimizer.build()
        optimizer.share_by(*share)
        optimizer.place_state([place] * len(optimizer.buckets))
        held = sum(bucket.place.device_bytes() for bucket in optimizer.buckets)
        of_all = held / sum(b.layout.numel * (12 if b.has_master else 8) for b in optimizer.buckets)
        assert of_all == pytest.approx(share[1] if place == "shared" else 0.0, abs=0.01)
        with inject_delays(5, max_ms=2.0, share=0.3):
            run(optimizer, params, 4)
            with torch.no_grad():
                params[0][:] = params[0] + 0.5  # what the user writes counts, in every part
            run(optimizer, params, 2)
            optimizer.share_by(share[0], share[1] / 2)  # another cut, in the middle of training
            optimizer.place_state([place] * len(optimizer.buckets))
            optimizer.load_state_dict(optimizer.state_dict())
            run(optimizer, params, 2)
            optimizer.synchronize()
        state = optimizer.state_dict()["state"]
        results.append((params, state))
        kinds = [type(bucket.place) for bucket in optimizer.buckets]
        assert (SharedPlace in kinds) == (place == "shared")
        stats = optimizer.stats()["values_by_place"]
        assert set(stats) == {place}
    (ours, mine), (theirs, other) = results
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for index, entry in mine.items():
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[index][name])), name


def test_both_parts_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read after step() sees the new values of both, though either comes late."""
    from ts_core.optim import shared_place

    late = threading.Event()
    update = shared_place.HostPlace.update

    def slow(self: Any, *args: Any) -> Any:
        late.wait(0.3)
        return update(self, *args)

    monkeypatch.setattr(shared_place.HostPlace, "update", slow)
    params = [torch.nn.Parameter(torch.ones(600, 1000))]
    optimizer = optimizer_of(params, lr=0.5)
    optimizer.build()
    optimizer.place_state(["shared"])
    (place,) = (bucket.place for bucket in optimizer.buckets)
    device = optimizer._updates.storage.device
    assert device is not None
    link = optimizer._updates.storage.device_work().stream(over_link=True)
    device.launch(link, lambda: time.sleep(0.3))
    begun = time.monotonic()
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert time.monotonic() - begun < 0.25  # step() does not wait
    assert float(params[0].detach().max()) < 1.0
    assert place.seconds > 0 and time.monotonic() - begun >= 0.3


def test_the_host_begins_with_the_first_piece_and_before_what_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient that comes last is not waited for as a whole, nor behind older host updates."""
    from ts_core.optim.places import HostPlace

    params = [torch.nn.Parameter(torch.ones(600_000)) for _ in range(4)]
    optimizer = optimizer_of(params, lr=0.5, chunk_elems=4096)  # pieces of 65,536 values
    optimizer.build()
    optimizer.share_by(0.5)
    optimizer.place_state(["shared", "host", "host", "host"])
    device = optimizer._updates.storage.device
    copies = optimizer._updates.storage.copies
    assert device is not None and copies is not None
    began: list[tuple[int, int]] = []
    pieces: list[Any] = []
    first_piece, all_queued = threading.Event(), threading.Event()
    update, d2h = HostPlace.update, copies.d2h

    def on_host(self: Any, job: Any, scale: float) -> Any:
        if not began:
            assert all_queued.wait(10)
        size = job.target.numel()
        began.append((size, job.segments[0].offset))
        if size < 600_000:
            first_piece.set()
        return update(self, job, scale)

    def slow_d2h(dst_h: torch.Tensor, *args: Any, **options: Any) -> Any:
        if dst_h.numel() == 300_032 % 65_536:  # the last piece, once the first has been updated
            stream = copies._lanes["d2h"].stream
            device.launch(stream, lambda: first_piece.wait(10))
        event = d2h(dst_h, *args, **options)
        if dst_h.numel() == 65_536:
            pieces.append(event)
        return event

    monkeypatch.setattr(HostPlace, "update", on_host)
    monkeypatch.setattr(copies, "d2h", slow_d2h)
    for param in reversed(params):
        param.grad = torch.ones_like(param)
        optimizer._on_gradient(param)
    shared = optimizer.buckets[0].flight
    assert shared is not None
    while len(optimizer._updates.pipeline._newest_first._waiting) < 3:
        time.sleep(0.01)  # two of the host's own, and the part of what is shared
    pieces[0].synchronize()
    all_queued.set()
    optimizer.step()
    optimizer.synchronize()
    assert first_piece.is_set()
    sizes = [size for size, _ in began]
    parts = [offset for size, offset in began if size < 600_000]
    assert parts == list(range(0, 300_032, 65_536))
    assert sizes[0] == 600_000 and sizes[1] < 600_000  # only what ran already came before it
    assert sizes[-2:] == [600_000, 600_000]
    assert all(float(param.detach().max()) < 1.0 for param in params)


def test_an_error_of_the_hosts_part_reaches_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    from ts_core.optim import shared_place

    def fails(self: Any, *args: Any) -> Any:
        raise MemoryError("no host memory")

    params = [torch.nn.Parameter(torch.ones(600, 1000))]
    optimizer = optimizer_of(params)
    optimizer.build()
    optimizer.place_state(["shared"])
    with monkeypatch.context() as patched:
        patched.setattr(shared_place.HostPlace, "update", fails)
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
        with pytest.raises(MemoryError, match="no host memory"):
            params[0].sum()


def test_another_cut_never_has_two_copies_in_device_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ts_core.optim import storage

    param = torch.nn.Parameter(torch.ones(600_000))
    optimizer = optimizer_of([param], mode="gpu", lr=0.1)
    optimizer.build()
    alive: list[int] = []

    class Counted(storage.DevicePlace):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if self.name == "resident":
                alive.append(optimizer.buckets[0].place.device_bytes())

    monkeypatch.setattr(storage, "DevicePlace", Counted)
    for near in (0.25, 0.75, 0.75, 0.5):
        optimizer.share_by(0.5, near)
        optimizer.place_state(["shared"])
        (bucket,) = optimizer.buckets
        assert bucket.near_share == pytest.approx(near, abs=0.001)
        assert optimizer.state_on_device() == bucket.place.device_bytes() > 0
    assert alive == [0, 0, 0]  # the third asked for what was there


def test_what_cannot_be_cut_is_updated_over_the_link() -> None:
    params = [torch.nn.Parameter(torch.ones(size)) for size in (3, (600, 1000))]
    optimizer = optimizer_of(params)
    optimizer.build()
    optimizer.place_state(["shared"] * 2)
    names = {bucket.layout.numel: bucket.place.name for bucket in optimizer.buckets}
    assert names == {3: "zero_copy", 600_000: "shared"}


def test_a_split_counts_each_part_where_it_is_done() -> None:
    rates = Rates(4e9, 45e9)
    rest = [Piece(10 * MILLION, 40 * MILLION, False)] * 20
    last = Piece(300 * MILLION, 1200 * MILLION, False, link_share=0.75)
    found = split([*rest, last], rates, 0)
    assert found.places[-1] == "shared" and {"host", "zero_copy"} <= set(found.places[:-1])
    assert last.host_values("shared") == 75 * MILLION
    assert last.copied_bytes("shared") == Bytes(300 * MILLION, 300 * MILLION)
    state = 3 * 2400 * MILLION // 4
    assert last.link_bytes("shared") == Bytes(state + 300 * MILLION, state + 300 * MILLION)
    alone = timed([replace(last, link_share=link_share(rates))], ("shared",), rates)
    assert alone.seconds < 0.95 * timed([last], ("zero_copy",), rates).seconds
    assert split([*rest, last], rates, 10**10).places[-1] == "resident"
    assert timed([], (), rates, others=NOTHING).seconds == 0.0


def test_room_for_a_part_of_what_comes_last_is_used() -> None:
    rates = Rates(4e9, 45e9)
    rest = [Piece(50 * MILLION, 200 * MILLION, False)] * 20
    last = Piece(300 * MILLION, 1200 * MILLION, False, link_share=0.5)
    room = 1800 * MILLION
    found = split([*rest, last], rates, room)
    assert found.places[-1] == "shared" and found.near_share == pytest.approx(0.75)
    assert "resident" not in found.places  # what comes last is what a step waits for
    cut = replace(last, near_share=found.near_share)
    assert cut.device_bytes("shared") == room
    assert cut.host_values("shared") == 37_500_000
    assert cut.link_bytes("shared") == Bytes(*(int(n / 4) for n in last.link_bytes("shared")))
    words = in_words([*rest, last], found, rates, "measured")
    assert "17% of the state in device memory" in words and "6% by both together" in words
    little = split([*rest, last], rates, 200 * MILLION)
    assert little.near_share == 0.0  # not worth a cut


@pytest.mark.parametrize(("host", "link"), [(4e9, 45e9), (1e9, 45e9), (4e9, 6e9), (1e7, 45e9)])
def test_both_parts_take_equally_long_beside_each_other(host: float, link: float) -> None:
    share = link_share(Rates(host, link))
    of_link, of_host = (share * 8 + (1 - share) * 4) / (0.85 * link), (1 - share) / (0.65 * host)
    assert of_link == pytest.approx(of_host) or share == (0.9 if host < link / 100 else 0.1)


def test_a_split_keeps_to_room_that_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "_LARGE", 500_000)
    params = [torch.nn.Parameter(torch.randn(600, 1000)) for _ in range(3)]
    optimizer = optimizer_of(params, mode="hybrid", lr=0.01)
    optimizer.build()
    inside = optimizer._updates
    room = [0]
    inside.split = HybridSplit(
        inside.storage.device,  # type: ignore[arg-type]
        lambda: Rates(4e9, 45e9),
        lambda: room[0] - optimizer.state_on_device(),
        lambda line: None,
    )
    (first,) = (bucket for bucket in optimizer.buckets if bucket.params[0] is params[0])
    run(optimizer, params, 3)
    assert first.place.name == "shared" and first.near_share == 0.0
    room[0] = 2_400_000  # half of its state
    run(optimizer, params, 2)
    assert first.near_share == pytest.approx(0.5, abs=0.01)
    room[0] = 2_500_000  # not worth moving all of it
    run(optimizer, params, 2)
    assert first.near_share == pytest.approx(0.5, abs=0.01)
    size, seconds = inside.split.away(optimizer.buckets)
    assert size == pytest.approx(2.5 * 4_800_000, rel=0.01) and seconds > 0.0
    assert optimizer.give_state_back(1_200_000)
    assert first.near_share == pytest.approx(0.25, abs=0.01)
    assert optimizer.give_state_back(1_000_000)
    assert first.near_share == 0.0 and optimizer.state_on_device() == 0
    assert not optimizer.give_state_back(1_000_000)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_split_shares_the_large_parameter_whose_gradient_comes_last(
    clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "_LARGE", 500_000)
    results = []
    for mode in ("hybrid", "cpu"):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(600, 1000)) for _ in range(6)]
        lines: list[str] = []
        optimizer = optimizer_of(params, mode=mode, max_grad_norm=clip, lr=0.01)
        if mode == "hybrid":
            optimizer.build()
            inside = optimizer._updates
            inside.split = HybridSplit(
                inside.storage.device,  # type: ignore[arg-type]
                lambda: Rates(4e9, 45e9),
                lambda: 0,
                lines.append,
                lambda: clip is not None,
            )
        run(optimizer, params, 10)
        optimizer.synchronize()
        results.append(params)
        if mode == "hybrid":
            shared = [
                b.params[0] is params[0] for b in optimizer.buckets if b.place.name == "shared"
            ]
            assert shared == ([True] if clip is None else [])
            assert any("by both together" in line for line in lines) == (clip is None)
            assert len(lines) <= 2  # nothing moves to and fro
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
