"""Giving the streaming ring more slots after the first steps, where loads are waited for.

`SlotTuner` decides; this module times steps and waits, reads the room, and changes the ring between
a step and the next forward. Once settled nothing is timed any more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ts_core.device import Device
from ts_core.engine.step_times import StepTimes
from ts_core.schedule import Plan
from ts_core.schedule.slot_tuner import SlotTuner
from ts_core.store import ParamPager
from ts_core.store.load_waits import LoadWaits

# Of the memory that is free at the peak of a step: a longer input, or state of the optimizer that
# moves to the device, may want some, too.
_USE_OF_ROOM = 0.5


class SlotDepth:
    """The slots of one placement of blocks.

    Args:
        device: of the session.
        plan: in force.

    Attributes:
        tuner: decides.
    """

    def __init__(self, device: Device, plan: Plan) -> None:
        self.tuner = SlotTuner(plan.slot_count, len(plan.paged))
        self._device = device
        self._times = StepTimes(device)
        self._waits = LoadWaits(device)
        self._timed: deque[tuple[float, int]] = deque()
        self._waited: deque[tuple[float, int]] = deque()
        self._begun = False

    def observe(self, pager: ParamPager, left: int) -> bool:
        """A training forward begins, after a step.

        Args:
            pager: of the placement.
            left: bytes of device memory under the target that the steps so far left free;
                negative when they took more.

        Returns:
            Whether `tuner.slots` is another number now, which the ring should get.
        """
        if left < 0:
            self._end(pager)
            return self.tuner.tighten()
        if self.tuner.settled:
            self._end(pager)
            return False
        changed = False
        if self._begun:
            self._waits.end_step(self.tuner.trial)
        slot_bytes, more = max(1, pager.ring.slot_bytes), self.tuner.slots - self.tuner.planned
        room = int(_USE_OF_ROOM * (left + more * slot_bytes)) // slot_bytes - more
        self._timed.extend(self._times.finished())
        self._waited.extend(self._waits.finished())
        while self._timed and self._waited:
            (seconds, label), (waited, _) = self._timed.popleft(), self._waited.popleft()
            if label == self.tuner.trial:
                changed = self.tuner.observe(seconds, waited, room) or changed
        self._begun = True
        pager.waits = self._waits
        self._times.begin(self.tuner.trial)
        if self.tuner.settled:
            self._end(pager)
        return changed

    def with_slots(self, plan: Plan) -> Plan:
        """`plan` with as many slots as were found."""
        predicted = dict(plan.predicted)
        more = self.tuner.slots * plan.slot_bytes - predicted.get("slots", 0)
        for name in ("slots", "total"):
            predicted[name] = predicted.get(name, 0) + more
        return replace(plan, slot_count=self.tuner.slots, predicted=predicted)

    def _end(self, pager: ParamPager) -> None:
        pager.waits = None
        self._times.clear()
        self._begun = False
