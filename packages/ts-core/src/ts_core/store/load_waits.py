"""How long the device waits for the weights of blocks, learned without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from ts_core.device.base import Device, Timestamp


class LoadWaits:
    """Times between the points of the compute stream before and after each wait for a load.

    Args:
        device: whose compute stream waits.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._now: list[tuple[Timestamp, Timestamp]] = []
        self._steps: deque[tuple[int, list[tuple[Timestamp, Timestamp]]]] = deque()

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around a wait."""
        begin = self._device.timestamp()
        yield
        self._now.append((begin, self._device.timestamp()))

    def end_step(self, label: int) -> None:
        """What was waited for since the last call belongs to a step of this label."""
        self._steps.append((label, self._now))
        self._now = []

    def finished(self) -> Iterator[tuple[float, int]]:
        """Seconds waited, and label, of each step that the device has finished."""
        while self._steps:
            label, waits = self._steps[0]
            seconds = [end.seconds_since(begin) for begin, end in waits]
            known = [one for one in seconds if one is not None]
            if len(known) < len(seconds):
                return
            self._steps.popleft()
            yield sum(known), label
