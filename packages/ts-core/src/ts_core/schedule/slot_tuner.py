"""How many blocks ahead weights are loaded: a state machine without a clock.

Two slots suffice where a block's load takes no longer than computing the block before it, and
where nothing comes late. Otherwise more slots let loads run further ahead, and more blocks are
still there when backward begins. Whether that pays is measured: slots are added while the device
waits for loads, there is room, and steps become faster by it.
"""

from __future__ import annotations

from statistics import median

# Steps that count in a trial; the one before them still runs with what was.
_WINDOW = 3
# Waiting for less than this share of a step is not worth a trial.
_WAITED_SHARE = 0.03
# A trial must shorten steps by this share, or its slots are given back.
_GAIN = 0.01
_MOST = 16


class SlotTuner:
    """Tries more slots while steps wait for loads.

    Args:
        slots: of the plan.
        blocks: that stream, which is the most slots of any use.

    Attributes:
        planned: slots of the plan.
        slots: to have now.
        settled: whether that is final.
        trial: number of the trial, to label the steps that run in it.
        reason: why it settled, in plain words.
    """

    def __init__(self, slots: int, blocks: int) -> None:
        self.slots = slots
        self.settled = False
        self.trial = 0
        self.reason = ""
        self.planned = slots
        self._most = min(blocks, _MOST)
        self._steps: list[tuple[float, float]] = []
        self._best: tuple[int, float] | None = None
        if slots >= self._most:
            self._settle(slots, "no more blocks stream")

    def observe(self, seconds: float, waited: float, room: int) -> bool:
        """A step of the current trial has run.

        Args:
            seconds: of the step.
            waited: seconds of it that the device waited for loads.
            room: slots for which the device has room beside those there are.

        Returns:
            Whether `slots` has changed.
        """
        if self.settled:
            return False
        self._steps.append((seconds, waited))
        if len(self._steps) <= _WINDOW:
            return False
        counted = self._steps[1:]
        self._steps = []
        before = self.slots
        self._decide(median(s for s, _ in counted), median(w for _, w in counted), room)
        self.trial += 1
        return self.slots != before

    def tighten(self) -> bool:
        """Memory is short: no more slots than planned. Returns whether `slots` has changed."""
        before = self.slots
        self._settle(self.planned, "the device's memory is needed otherwise")
        return self.slots != before

    def _decide(self, step: float, waited: float, room: int) -> None:
        if self._best is not None and step > (1 - _GAIN) * self._best[1]:
            slots, best = self._best
            self._settle(slots, f"{self.slots} made no faster steps ({_ms(step)} for {_ms(best)})")
            return
        self._best = (self.slots, step)
        more = min(self.slots + max(1, self.slots // 2), self.slots + room, self._most)
        if waited < _WAITED_SHARE * step:
            self._settle(self.slots, f"{_ms(waited)} of a step of {_ms(step)} wait for loads")
        elif more <= self.slots:
            self._settle(self.slots, f"no room for more ({_ms(waited)} of {_ms(step)} are waits)")
        else:
            self.slots = more

    def _settle(self, slots: int, reason: str) -> None:
        self.slots = slots
        self.settled = True
        self.reason = reason


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
