"""Choosing among activation policies by measured step times: state machines without a clock.

The caller runs steps under `current` and reports what each took; `current` changes between steps
until `settled`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

from ts_core.schedule.activation_policy import ActivationPolicy
from ts_core.schedule.places import spread
from ts_core.schedule.plan import KEEP, OFFLOAD

# The first step of a policy also fills its buffers and is not counted.
WARMUP_STEPS = 1
# A policy must be this much faster to be chosen over one that was tried before it.
LEAST_GAIN = 0.01
# A trial costs steps; one that could gain less than this share of a step is not made.
WORTH_A_TRIAL = 0.03


class Tuner(Protocol):
    """A search over policies.

    Attributes:
        current: the policy to run the next step with.
        settled: whether `current` stays.
        trial: grows when `current` changes; a time measured under another trial is void.
        reasons: what was found, in plain words.
    """

    current: ActivationPolicy
    settled: bool
    trial: int
    reasons: list[str]

    def observe(self, seconds: float) -> None:
        """One step under `current` took `seconds`."""


class Fixed:
    """A policy that is not searched for."""

    def __init__(self, policy: ActivationPolicy) -> None:
        self.current = policy
        self.settled = True
        self.trial = 0
        self.reasons: list[str] = []

    def observe(self, seconds: float) -> None:
        """Nothing to learn."""


class _Search:
    """What the searches share: a window of steps per policy, whose median counts."""

    def __init__(self, window: int) -> None:
        self.settled = False
        self.trial = 0
        self.reasons: list[str] = []
        self._window = window
        self._times: list[float] = []
        self._skip = WARMUP_STEPS

    def _measured(self, seconds: float) -> float | None:
        """The median once the window is full."""
        if self._skip:
            self._skip -= 1
            return None
        self._times.append(seconds)
        if len(self._times) < self._window:
            return None
        return statistics.median(self._times)

    def _next(self) -> None:
        self.trial += 1
        self._times = []
        self._skip = WARMUP_STEPS


class RecomputeTuner(_Search):
    """How many of the blocks that cannot stay are recomputed rather than paged.

    Paging costs time on the link and recomputing arithmetic, and the two overlap, so the time of a
    step is taken for a convex function of the share. All are recomputed first, which needs no host
    memory, then half. When that is no faster, paging more is not either, and nothing more is tried.
    Otherwise none, and at most one share between, where that could still be worth while.

    Args:
        policy_for: the policy with that share recomputed, within the limits.
        window: steps per policy that count; the fastest is its time.

    Attributes:
        share: of `current`.
        tried: whether anything was measured.
    """

    def __init__(self, policy_for: Callable[[float], ActivationPolicy], window: int = 2) -> None:
        super().__init__(window)
        self._policy_for = policy_for
        self._found: dict[float, float] = {}
        self.share = 1.0
        self.current = policy_for(self.share)
        self.tried = False
        if self.current.modes == policy_for(0.0).modes:
            self.settled = True  # nothing can be recomputed instead of paged

    def observe(self, seconds: float) -> None:
        """One step under `current` took `seconds`."""
        if self.settled:
            return
        if self._measured(seconds) is None:
            return
        self.tried = True
        self._found[self.share] = min(self._times)
        for share in self._worth_trying():
            policy = self._policy_for(share)
            if all(policy.modes != self._policy_for(other).modes for other in self._found):
                self.share, self.current = share, policy
                self._next()
                return
        self._settle()

    def _worth_trying(self) -> tuple[float, ...]:
        """Shares that could be faster than those that were tried."""
        found = self._found
        if 0.5 not in found:
            return (0.5, 0.0)  # one moved block has no half
        if 0.0 not in found:
            return (0.0,) if found[0.5] < found[1.0] * (1 - LEAST_GAIN) else ()
        if len(found) > 3:
            return ()
        # A convex function lies above the line through two points, beyond them.
        least = {
            0.25: found[0.5] - (found[1.0] - found[0.5]) / 2,
            0.75: found[0.5] - (found[0.0] - found[0.5]) / 2,
        }
        share = min(least, key=lambda share: least[share])
        return (share,) if least[share] < (1 - WORTH_A_TRIAL) * min(found.values()) else ()

    def _best(self) -> float:
        best = next(iter(self._found))
        for share, seconds in self._found.items():
            if seconds < self._found[best] * (1 - LEAST_GAIN):
                best = share
        return best

    def _settle(self) -> None:
        self.share = self._best()
        self.current = self._policy_for(self.share)
        self.settled = True
        self._next()
        times = ", ".join(
            f"{share:.0%} {seconds * 1000:.1f} ms" for share, seconds in sorted(self._found.items())
        )
        self.reasons.append(
            f"share of the moved blocks that is recomputed rather than paged, by measured step "
            f"time: {times}; {self.share:.0%} chosen"
        )


class SlowdownTuner(_Search):
    """As many paged blocks as cost at most `max_slowdown` of the step time, beyond a start.

    Args:
        start: the policy whose time is the measure; its blocks that stay are candidates.
        max_slowdown: the share of step time that paging may add.
        window: steps per policy that count.
        calibrate: steps of `start` that count.
    """

    def __init__(
        self, start: ActivationPolicy, max_slowdown: float, window: int = 3, calibrate: int = 3
    ) -> None:
        super().__init__(calibrate)
        self.current = start
        self._start = start
        self._steps = window
        self._max_slowdown = max_slowdown
        self._candidates = start.blocks(KEEP)[:-1]
        self._base: float | None = None
        self._good, self._bad = 0, len(self._candidates) + 1
        self._trying = 0
        self._last: float | None = None
        if not self._candidates:
            self.settled = True

    def observe(self, seconds: float) -> None:
        """One step under `current` took `seconds`."""
        if self.settled:
            return
        median = self._measured(seconds)
        if median is None:
            return
        if self._base is None:
            self._base, self._window = median, self._steps
            self._try(len(self._candidates))
            return
        if median <= self._base * (1 + self._max_slowdown):
            self._good, self._last = self._trying, median
        else:
            self._bad = self._trying
        if self._bad - self._good > 1:
            self._try((self._good + self._bad) // 2)
            return
        self.current = self._paging(self._good)
        self.settled = True
        self._next()
        cost = "" if self._last is None else f" at {self._last / self._base - 1:+.1%} step time"
        self.reasons.append(
            f"{self._good} more blocks paged{cost} (at most {self._max_slowdown:.0%} was allowed)"
        )

    def _try(self, count: int) -> None:
        self._trying = count
        self.current = self._paging(count)
        self._next()

    def _paging(self, count: int) -> ActivationPolicy:
        modes = list(self._start.modes)
        for k in _spread(count, self._candidates):
            modes[k] = OFFLOAD
        return ActivationPolicy(tuple(modes))


def _spread(count: int, items: Sequence[int]) -> list[int]:
    return [items[k] for k in spread(count, len(items))] if count else []
