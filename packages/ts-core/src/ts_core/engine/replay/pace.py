"""How fast the host queues blocks, beside how fast the device computes them."""

from __future__ import annotations

import statistics
import time
from collections import deque

from ts_core.device import Device
from ts_core.device.base import Timestamp

# Recordings shorten what the host does for a block. Where that takes at most this share of what
# the device does, it is hidden with and without them.
_HIDDEN = 0.75
_KEPT = 256
_ENOUGH = 4


class Pace:
    """Times blocks that follow each other in a forward; the device is never waited for.

    Args:
        device: the blocks compute on.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: tuple[int, float, Timestamp] | None = None
        self._pairs: deque[tuple[float, Timestamp, Timestamp]] = deque(maxlen=_KEPT)

    def enter(self, index: int) -> None:
        """A block is called."""
        now, mark = time.perf_counter(), self._device.timestamp()
        if self._last is not None and index == self._last[0] + 1:
            self._pairs.append((now - self._last[1], self._last[2], mark))
        self._last = index, now, mark

    def seconds(self) -> tuple[float, float] | None:
        """(of the host, of the device) for a block: medians; None while too few are known."""
        known = [
            (host, on_device)
            for host, begun, ended in self._pairs
            if (on_device := ended.seconds_since(begun)) is not None
        ]
        if len(known) < _ENOUGH:
            return None
        host, on_device = (statistics.median(values) for values in zip(*known, strict=True))
        return host, on_device

    def device_bound(self) -> str | None:
        """Why recordings would not make steps shorter, in words; None where they may."""
        found = self.seconds()
        if found is None or found[0] > _HIDDEN * found[1]:
            return None
        host, on_device = (1000 * seconds for seconds in found)
        return f"the host queues a block in {host:.2f} ms, which takes the device {on_device:.2f}"
