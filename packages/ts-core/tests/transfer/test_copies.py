"""Copies: order by events, accounting, the in-flight limit, errors that reach the caller."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from ts_core import transfer_stats
from ts_core.config import WrapOptions, default_inflight_bytes, default_leaving_bytes
from ts_core.device import HostDevice
from ts_core.device.host import HostStream
from ts_core.errors import OutOfBudgetError
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine, SlotRing


def test_copies_are_ordered_behind_events_and_counted() -> None:
    device = HostDevice()
    engine = CopyEngine(device)
    source, middle, target = (torch.full((1000,), k, dtype=torch.float32) for k in range(3))
    with inject_delays(1, share=1.0):
        there = engine.h2d(middle, source)
        back = engine.d2h(target, middle, after=there)
        engine.wait_compute(back)
    assert torch.equal(target, source)
    stats = engine.stats()
    assert (stats["h2d"].bytes, stats["d2h"].copies) == (4000, 1)


def test_new_values_do_not_wait_behind_a_buffer_that_is_in_use() -> None:
    device = HostDevice()
    engine = CopyEngine(device)
    used = threading.Event()
    reader = device.new_stream("reader")
    device.launch(reader, lambda: used.wait() and None)
    source, buffer, weight = torch.ones(8), torch.zeros(8), torch.zeros(8)
    filled = engine.h2d(buffer, source, after=reader.record())
    engine.values_h2d(weight, source).synchronize()  # a timeout here: it waits for the reader
    assert weight.tolist() == [1.0] * 8 and not filled.query()
    used.set()
    filled.synchronize()
    stats = engine.stats()["h2d"]
    assert (stats.bytes, stats.copies) == (64, 2)


def test_new_values_are_waited_for_and_counted_as_other_copies() -> None:
    device = HostDevice()
    engine = CopyEngine(device)
    reader = device.new_stream("reader")
    device.delay(reader, 0.1)
    weight, before = torch.zeros(8), transfer_stats()["h2d"]
    engine.values_h2d(weight, torch.ones(8), after=reader.record())
    engine.synchronize()
    assert weight.tolist() == [1.0] * 8
    after = transfer_stats()["h2d"]
    assert [after[name] - before[name] for name in ("bytes", "copies")] == [32, 1]


def test_pieces_are_one_copy_behind_its_event_and_before_its_own() -> None:
    engine = CopyEngine(HostDevice())
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(60, dtype=torch.uint8)
    with inject_delays(2, share=1.0):
        before = engine.h2d(source, torch.arange(100, 200, dtype=torch.uint8))
        done = engine.h2d_pieces(target, source, [(0, 90, 10), (10, 0, 20), (40, 50, 20)], before)
        engine.wait_compute(done)
    assert target.tolist() == [*range(190, 200), *range(100, 120), *[0] * 10, *range(150, 170)]
    stats = engine.stats()["h2d"]
    assert (stats.bytes, stats.copies) == (150, 4)
    alive = weakref.ref(target)
    del target
    engine.synchronize()
    assert alive() is None


def test_what_a_peak_has_not_seen_in_flight() -> None:
    device = HostDevice()
    engine = CopyEngine(device, max_inflight_bytes=1000)
    assert [engine.unseen_bytes(size) for size in (300, 5000)] == [300, 1000]
    gate = threading.Event()
    lane = engine._lanes["d2h"].stream
    assert isinstance(lane, HostStream)
    lane.submit(lambda: gate.wait() and None)
    engine.d2h(torch.empty(400, dtype=torch.uint8), torch.zeros(400, dtype=torch.uint8))
    assert [engine.unseen_bytes(size) for size in (300, 5000)] == [0, 600]
    device.reset_peak()  # which begins again with what is in flight now
    assert engine.unseen_bytes(5000) == 600
    gate.set()
    engine.synchronize()
    assert engine.unseen_bytes(5000) == 600  # of the peak so far
    device.reset_peak()
    assert engine.unseen_bytes(5000) == 1000


def test_bytes_in_flight_are_bounded() -> None:
    device = HostDevice()
    engine = CopyEngine(device, max_inflight_bytes=1000)
    gate = threading.Event()
    lane = engine._lanes["h2d"].stream
    assert isinstance(lane, HostStream)
    lane.submit(lambda: gate.wait() and None)
    engine.h2d(torch.empty(900, dtype=torch.uint8), torch.zeros(900, dtype=torch.uint8))
    timer = threading.Timer(0.2, gate.set)
    timer.start()
    started = time.monotonic()
    engine.h2d(torch.empty(900, dtype=torch.uint8), torch.zeros(900, dtype=torch.uint8))
    assert time.monotonic() - started > 0.1
    assert engine.stats()["h2d"].limit_waits == 1
    engine.synchronize()
    engine.h2d(torch.empty(5000, dtype=torch.uint8), torch.zeros(5000, dtype=torch.uint8))
    engine.synchronize()


def test_sources_go_once_their_stream_waits_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last gradients of a step would be kept until the first copy of the next one."""
    device = HostDevice()
    forward = device.new_stream("forward")
    monkeypatch.setattr(device, "compute_stream", lambda: forward)
    engine = CopyEngine(device)
    gate, ran = threading.Event(), threading.Event()
    lane = engine._lanes["d2h"]
    device.launch(lane.stream, lambda: gate.wait() and None)
    sources = [torch.ones(8) for _ in range(3)]
    targets = [torch.zeros(8) for _ in range(3)]
    engine.d2h(targets[0], sources[0], made_here=True)
    engine.d2h(targets[1], sources[1])
    engine.d2h(targets[2], sources[2], keep_source=False)
    held = [[*copy.keep, copy.source] for copy in lane.in_flight]
    assert held[0][1] is sources[0] and held[1][1] is sources[1] and held[2][1] is None
    engine.let_go()
    device.launch(forward, ran.set)
    assert [copy.source for copy in lane.in_flight] == [None] * 3
    # What is written is kept, and so is a source that may belong to anybody.
    assert [len(copy.keep) for copy in lane.in_flight] == [1, 2, 1]
    assert lane.in_flight_bytes == 3 * 32  # still on their way
    assert not ran.wait(0.1)
    gate.set()
    assert ran.wait(10)
    engine.synchronize()
    assert all(torch.equal(target, torch.ones(8)) for target in targets)


@pytest.mark.gpu
def test_torch_gives_a_source_that_was_let_go_to_later_work_only() -> None:
    from ts_core.device import resolve_device

    device = resolve_device("cuda")
    engine = CopyEngine(device, 1 << 30)
    count = 16 << 20
    host = torch.zeros(count, pin_memory=True)
    for made_here in (False, True):
        before = torch.cuda.memory_allocated()
        lane = engine._lanes["d2h"]
        source = torch.full((count,), 7.0, device="cuda")
        device.delay(lane.stream, 0.2)
        engine.d2h(host, source, after=engine.record_compute(), made_here=made_here)
        del source
        engine.let_go()
        assert torch.cuda.memory_allocated() == before + (0 if made_here else 4 * count)
        other = torch.full((count,), 9.0, device="cuda")  # where the source was
        engine.synchronize()
        assert bool((host == 7.0).all()) and bool((other == 9.0).all())
        del other
        host.zero_()


class Small(HostDevice):
    """Memory of its own, of a few bytes."""

    separate_memory = True

    def usable_bytes(self) -> int:
        return 8000


def test_what_leaves_a_small_device_takes_half_of_what_comes() -> None:
    """It is device memory, which must stay within the headroom if the link falls behind."""
    engine = CopyEngine(Small())
    assert (engine.max_inflight_bytes, engine.max_leaving_bytes) == (800, 400)
    gate = threading.Event()
    for name, copy in (("d2h", engine.d2h), ("h2d", engine.h2d)):
        lane = engine._lanes[name].stream
        assert isinstance(lane, HostStream)
        lane.submit(lambda: gate.wait() and None)
        copy(torch.empty(300, dtype=torch.uint8), torch.zeros(300, dtype=torch.uint8))
    assert engine.unseen_bytes(5000) == 100
    threading.Timer(0.2, gate.set).start()
    for copy in (engine.h2d, engine.d2h):
        copy(torch.empty(300, dtype=torch.uint8), torch.zeros(300, dtype=torch.uint8))
    stats = engine.stats()
    assert (stats["h2d"].limit_waits, stats["d2h"].limit_waits) == (0, 1)
    engine.synchronize()


@pytest.mark.parametrize("given", [None, 500])
def test_a_limit_that_was_given_holds_in_both_directions(given: int | None) -> None:
    engine = CopyEngine(Small() if given else HostDevice(), given)
    limits = {engine.max_inflight_bytes, engine.max_leaving_bytes}
    assert limits == {given or 1 << 30}


@pytest.mark.parametrize("gib", [2, 6, 8, 12, 16, 24, 80])
def test_what_may_wait_for_the_link_fits_into_the_headroom(gib: int) -> None:
    """Of copies to the host, and half as much for updates by the device; some is left over."""
    size = gib << 30
    leaving = default_leaving_bytes(size)
    assert leaving + leaving // 2 <= 0.8 * WrapOptions().vram_headroom * size
    assert leaving <= default_inflight_bytes(size) <= 1 << 30
    assert gib < 24 or leaving == 1 << 30


def test_an_error_on_a_stream_reaches_whoever_waits() -> None:
    stream = HostStream("test")

    def fail() -> None:
        raise ValueError("lost the disk")

    stream.submit(fail)
    with pytest.raises(ValueError, match="lost the disk"):
        stream.record().synchronize()


def test_a_stream_ends_after_an_error_that_was_raised(
    started_threads: Callable[[], list[threading.Thread]],
) -> None:
    """The error's traceback holds the frame that waited, and that the stream."""

    def wait() -> None:
        stream = HostStream("test")
        stream.submit(lambda: 1 / 0 and None)
        stream.record().synchronize()

    with pytest.raises(ZeroDivisionError):
        wait()
    end = time.monotonic() + 30
    while started_threads() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert started_threads() == []


def test_slots_keep_their_addresses_and_are_accounted() -> None:
    device = HostDevice()
    device.set_limit(3000)
    ring = SlotRing(device, 1024, 2)
    assert device.pool.used == 2048
    addresses = [slot.buffer.data_ptr() for slot in ring.slots]
    assert all(address % 256 == 0 for address in addresses)
    view = ring.slots[1].buffer[256:512].view(torch.float32)
    assert ring.slot_of(view) is ring.slots[1]
    assert ring.slot_of(torch.empty(3)) is None
    with pytest.raises(OutOfBudgetError):
        SlotRing(device, 1024, 1)
    ring.close()
    assert device.pool.used == 0
    SlotRing(device, 1024, 1)


def test_idle_streams_take_no_cpu(cpu_of_threads: Callable[[], float]) -> None:
    streams = [HostStream(f"idle {k}") for k in range(4)]
    before = cpu_of_threads()
    time.sleep(0.3)
    assert cpu_of_threads() - before < 0.1
    assert len(streams) == 4


def test_sleeping_streams_hold_nothing() -> None:
    class Work:
        def __init__(self) -> None:
            self.done = threading.Event()

        def __call__(self) -> None:
            self.done.set()

    stream = HostDevice().new_stream("held")
    work = Work()
    gone, done = weakref.ref(work), work.done
    stream.submit(work)
    assert done.wait(20)
    del work
    end = time.monotonic() + 20
    while gone() is not None and time.monotonic() < end:
        time.sleep(0.001)
    assert gone() is None
