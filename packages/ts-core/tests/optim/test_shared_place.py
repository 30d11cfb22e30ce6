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
from ts_core.optim.rates import Rates
from ts_core.optim.shared_place import SharedPlace
from ts_core.optim.split import NOTHING, Bytes, Piece, link_share, split, timed
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


@pytest.mark.parametrize("share", [0.1, 0.5, 0.77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"eager": False}, {"max_grad_norm": 0.5}], ids=str)
def test_the_parts_make_the_whole(share: float, dtype: torch.dtype, options: Any) -> None:
    sizes = [(601, 1003), (257, 64), (90_001,)]
    results = []
    for place in ("host", "shared"):
        torch.manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]
        optimizer = optimizer_of(params, lr=0.01, weight_decay=0.1, chunk_elems=4096, **options)
        optimizer.build()
        optimizer.share_by(share)
        optimizer.place_state([place] * len(optimizer.buckets))
        with inject_delays(5, max_ms=2.0, share=0.3):
            run(optimizer, params, 4)
            with torch.no_grad():
                params[0][300:302] = 7.0  # what the user writes counts, on both sides of the cut
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
        return d2h(dst_h, *args, **options)

    monkeypatch.setattr(HostPlace, "update", on_host)
    monkeypatch.setattr(copies, "d2h", slow_d2h)
    for param in reversed(params):
        param.grad = torch.ones_like(param)
        optimizer._on_gradient(param)
    shared = optimizer.buckets[0].flight
    assert shared is not None
    while len(optimizer._updates.pipeline._newest_first._waiting) < 3:
        time.sleep(0.01)  # two of the host's own, and the part of what is shared
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


@pytest.mark.parametrize(("host", "link"), [(4e9, 45e9), (1e9, 45e9), (4e9, 6e9), (1e7, 45e9)])
def test_both_parts_take_equally_long_beside_each_other(host: float, link: float) -> None:
    share = link_share(Rates(host, link))
    of_link, of_host = (share * 8 + (1 - share) * 4) / (0.85 * link), (1 - share) / (0.65 * host)
    assert of_link == pytest.approx(of_host) or share == (0.9 if host < link / 100 else 0.1)


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
