"""How long steps took on the device, learned without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ts_core.device.base import Device, Timestamp


class StepTimes:
    """Times from the start of one forward to the start of the next.

    Args:
        device: whose compute stream is timed.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._mark: tuple[Timestamp, int] | None = None
        self._intervals: deque[tuple[Timestamp, Timestamp, int]] = deque()

    def skip(self) -> None:
        """The step that runs now is not like the others (an evaluation, say)."""
        self._mark = None

    def clear(self) -> None:
        """Forget everything."""
        self._mark = None
        self._intervals.clear()

    def finished(self) -> Iterator[tuple[float, int]]:
        """A forward begins: seconds and label of the steps that the device has finished."""
        self._now = self._device.timestamp()
        if self._mark is not None:
            self._intervals.append((self._mark[0], self._now, self._mark[1]))
        while self._intervals:
            start, end, label = self._intervals[0]
            seconds = end.seconds_since(start)
            if seconds is None:
                return
            self._intervals.popleft()
            yield seconds, label

    def begin(self, label: int) -> None:
        """The step that begins now (after `finished`) counts under `label`."""
        self._mark = (self._now, label)
