"""The one place where one stream waits for another, with a debug mode that injects delays.

Under `inject_delays` every copy and every wait is preceded or followed by a random pause on its
stream, so that a dependency nobody declared shows as a wrong number.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ts_core.device.base import Device, Event, Stream


class DelayPlan:
    """Seeded random pauses.

    Args:
        seed: of the random choice of places and lengths.
        max_ms: longest pause, in milliseconds.
        share: share of the places that pause.
    """

    def __init__(self, seed: int, max_ms: float, share: float) -> None:
        self._random = random.Random(seed)
        self._max_s = max_ms / 1000
        self._share = share
        self._lock = threading.Lock()
        self.pauses = 0

    def pause(self, device: Device, stream: Stream) -> None:
        """Perhaps occupy `stream` for a while."""
        seconds = self._draw()
        if seconds is not None:
            device.delay(stream, seconds)

    def pause_thread(self) -> None:
        """Perhaps hold the calling thread for a while."""
        seconds = self._draw()
        if seconds is not None:
            time.sleep(seconds)

    def _draw(self) -> float | None:
        with self._lock:
            if self._random.random() >= self._share:
                return None
            self.pauses += 1
            return self._random.random() * self._max_s


_plan: DelayPlan | None = None


@contextmanager
def inject_delays(seed: int, max_ms: float = 3.0, share: float = 0.5) -> Iterator[DelayPlan]:
    """Inject delays into every copy and wait of this process while the context is open."""
    global _plan
    before, _plan = _plan, DelayPlan(seed, max_ms, share)
    try:
        yield _plan
    finally:
        _plan = before


def pause(device: Device, stream: Stream) -> None:
    """A place where the debug mode may pause `stream`."""
    if _plan is not None:
        _plan.pause(device, stream)


def pause_thread() -> None:
    """A place where the debug mode may hold the calling thread."""
    if _plan is not None:
        _plan.pause_thread()


def wait(device: Device, stream: Stream, event: Event) -> None:
    """Make later work of `stream` wait for `event`."""
    pause(device, stream)
    stream.wait_event(event)
