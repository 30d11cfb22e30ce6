"""The RAM floor, with made-up readings."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

from ts_core.memory.ram_floor import RamFloor


def test_reports_once_until_rearmed() -> None:
    readings = iter([100, 50, 49, 48, 47, 46])
    reports: list[int] = []
    floor = RamFloor(50, reports.append, read=lambda: next(readings))
    assert [floor.check() for _ in range(4)] == [False, False, True, False]
    floor.rearm()
    assert floor.check()
    assert reports == [49, 47]


def test_thread_reports_and_ends(started_threads: Callable[[], list[threading.Thread]]) -> None:
    low = threading.Event()
    available = [100]
    floor = RamFloor(50, lambda now: low.set(), read=lambda: available[0], interval_s=0.001)
    floor.start()
    floor.start()
    assert started_threads() == [floor._thread]
    assert not low.wait(0.02)
    available[0] = 49
    assert low.wait(30)
    floor.stop()
    assert started_threads() == []
    floor.stop()


class Owner:
    def __init__(self) -> None:
        self.floor = RamFloor(50, self.low, read=lambda: 100, interval_s=0.001)
        self.floor.start()

    def low(self, available: int) -> None:
        raise AssertionError(available)


def test_the_watch_ends_with_its_owner() -> None:
    """Nobody need call stop(): a dropped model leaves no thread behind."""
    owner = Owner()
    thread = owner.floor._thread
    seen = weakref.ref(owner)
    del owner
    gc.collect()
    assert seen() is None
    thread.join(30)
    assert not thread.is_alive()
