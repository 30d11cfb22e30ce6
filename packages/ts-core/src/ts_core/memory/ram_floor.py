"""A watch on available RAM, so that a run gives memory back before the system kills it."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable

from ts_core.memory.ram import ram_available_bytes

DEFAULT_INTERVAL_S = 0.5


class RamFloor:
    """Calls `on_low(available)` from a thread of its own when RAM falls under a floor.

    It reports once, and again only after `rearm()`: what frees memory takes effect later.

    Args:
        floor_bytes: available RAM that must be left.
        on_low: called with the bytes available, on the watcher's thread; held weakly when it is a
            bound method, so the watch ends with its object.
        read: available bytes now (tests pass a made-up one).
        interval_s: seconds between readings.
    """

    def __init__(
        self,
        floor_bytes: int,
        on_low: Callable[[int], None],
        *,
        read: Callable[[], int] = ram_available_bytes,
        interval_s: float = DEFAULT_INTERVAL_S,
    ) -> None:
        self.floor_bytes = floor_bytes
        self._read = read
        self._interval_s = interval_s
        self._armed = True
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._on_low: Callable[[], Callable[[int], None] | None]
        if inspect.ismethod(on_low):
            self._on_low = weakref.WeakMethod(on_low)
        else:
            self._on_low = lambda: on_low

    def start(self) -> None:
        """Begin to watch; does nothing when it does already."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stop.clear()
        self._thread = threading.Thread(
            target=_watch,
            args=(weakref.ref(self), self._stop, self._interval_s),
            name="trainstream-ram-floor",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """End the watch and wait for its thread."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def rearm(self) -> None:
        """Report the next low reading again."""
        self._armed = True

    def check(self) -> bool:
        """Read once; returns whether `on_low` was called. The thread calls this."""
        available = self._read()
        if available >= self.floor_bytes or not self._armed:
            return False
        on_low = self._on_low()
        if on_low is None:
            self._stop.set()
            return False
        self._armed = False
        on_low(available)
        return True


def _watch(owner: weakref.ref[RamFloor], stop: threading.Event, interval_s: float) -> None:
    while not stop.wait(interval_s):
        floor = owner()
        if floor is None:
            return
        floor.check()
        del floor
