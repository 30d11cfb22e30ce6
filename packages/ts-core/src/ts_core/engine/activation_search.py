"""The policy that is in force next: decided from what was measured, then tried and corrected."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ts_core.device.base import Device
from ts_core.engine.activation_memory import ActivationMemory
from ts_core.engine.activation_options import ActivationOptions
from ts_core.engine.step_times import StepTimes
from ts_core.schedule.activation_policy import (
    ActivationLimits,
    ActivationPolicy,
    BlockActivations,
    decide,
)
from ts_core.schedule.activation_tuner import Fixed, RecomputeTuner, SlowdownTuner, Tuner
from ts_core.schedule.plan import KEEP

# Steps of a settled policy before its peak is looked at, and how often that may change it.
_STEPS_TO_PEAK = 2
_CORRECTIONS = 3
# Recordings are made once nothing changes any more, and what comes late makes them anew.
_CORRECTIONS_REPLAYED = 1
# Of the room there is: when every block stays and this much suffices, no correction is expected.
_SAFE_SHARE = 0.9
_USE_OF_SLACK = 0.9


class PolicySearch:
    """Looks for the policy with the shortest step within the limits.

    Args:
        options: what was asked for.
        device: whose steps are timed.
        memory: the room there is.
        count: blocks of the stack.
        say: takes decisions in plain words.

    Attributes:
        decision: the last one, in plain words.
        recomputes: whether "auto" may recompute blocks.
        streams: tells whether weights of blocks stream.
    """

    def __init__(
        self,
        options: ActivationOptions,
        device: Device,
        memory: ActivationMemory,
        count: int,
        say: Callable[[str], None],
    ) -> None:
        self.decision = "not decided yet: the first training step measures"
        self.recomputes = True
        self.streams: Callable[[], bool] = lambda: False
        self._options = options
        self._device = device
        self._memory = memory
        self._say = say
        self._times = StepTimes(device)
        self._measured: Sequence[BlockActivations] = ()
        self._limits: ActivationLimits | None = None
        self._tuner: Tuner = Fixed(ActivationPolicy((KEEP,) * count))
        self._corrections = 0
        self._safe = False
        self._steps = 0  # since the policy last changed
        self._peaks = 0  # how often the device's peak had been reset at the last step

    @property
    def current(self) -> ActivationPolicy:
        """What the next forward should run under."""
        return self._tuner.current

    @property
    def adapting(self) -> bool:
        """Whether the policy is expected to change by itself."""
        return not self._tuner.settled or (self._corrections > 0 and not self._safe)

    @property
    def watching(self) -> bool:
        """Whether a peak above the target would change the policy, if nothing else does."""
        return not self._tuner.settled or self._corrections > 0

    def begin(self, measured: Sequence[BlockActivations], device_room: int | None) -> None:
        """Start from a new measurement; a share of recomputation that was found is kept."""
        options = self._options
        tuner = self._tuner
        found = isinstance(tuner, RecomputeTuner) and tuner.settled and tuner.tried
        share = self._share() if found else None
        self._measured = measured
        self._limits = self._memory.limits(device_room)
        start = self._policy_for(share or 0.0)
        everything_fits = all(mode == KEEP for mode in start.modes)
        self._tuner = Fixed(start)
        if options.trials and self._device.separate_memory:
            if options.max_slowdown is not None and options.offload == "auto" and everything_fits:
                self._tuner = SlowdownTuner(
                    start, options.max_slowdown, options.tune_window, options.calibrate_steps
                )
            elif share is None and options.recompute == "auto":
                self._tuner = RecomputeTuner(self._policy_for)
        watched = self._device.separate_memory and options.searches
        if isinstance(self._tuner, SlowdownTuner):
            watched = False  # its blocks stay away for their own reason
        most = _CORRECTIONS_REPLAYED if options.replayed else _CORRECTIONS
        self._corrections = most if watched else 0
        enough = device_room is None or start.device_bytes <= int(_SAFE_SHARE * device_room)
        self._safe = everything_fits and enough
        self._steps = 0
        for reason in self._tuner.current.reasons[:-1]:
            self._say(f"activations: {reason}")
        self.decided(self._tuner.current.reasons[-1])

    def fix(self, policy: ActivationPolicy, text: str, *, silently: bool = False) -> None:
        """Search no longer: `policy` it is, for the reason `text`."""
        self._tuner = Fixed(policy)
        self._corrections = 0
        if silently:
            self.decision = text
        else:
            self.decided(text)

    def adopted(self) -> None:
        """The current policy is in force from the next forward on, and peaks count from here."""
        self._steps = 0
        self._peaks = self._device.peaks

    def decided(self, text: str) -> None:
        """Note a decision, and say it."""
        self.decision = text
        self._say(f"activations: {text}" if not text.startswith("activations") else text)

    def skip_step(self) -> None:
        """The time since the last training forward is no step's (an evaluation came)."""
        self._times.skip()

    def stop_timing(self) -> None:
        """What follows are no steps to compare."""
        self._times.clear()

    def time_steps(self) -> None:
        """Give the tuner the times of finished steps; the device is never waited for."""
        if self._tuner.settled:
            self._times.clear()
            return
        for seconds, trial in self._times.finished():
            if trial == self._tuner.trial:
                self._tuner.observe(seconds)
        if self._tuner.settled:
            for reason in self._tuner.reasons:
                self._say(f"activations: {reason}")
            self.decided((self._tuner.current.reasons or self._tuner.reasons)[-1])
        self._times.begin(self._tuner.trial)

    def look_at_peak(self) -> None:
        """Once settled: what the measured peak leaves beyond what was foreseen is room, too.

        So blocks return to the device, or leave it when the peak was higher.
        """
        if self._corrections == 0 or not self._tuner.settled:
            return
        if self._peaks != self._device.peaks:  # by someone who has just moved something
            self._peaks = self._device.peaks
            return  # no whole step has been seen since
        self._steps += 1
        if self._steps < _STEPS_TO_PEAK:
            return
        left = self._memory.device_left()
        room = None if self._limits is None else self._limits.device_room
        if left is None or room is None:
            self._corrections = 0
            return
        before = self._tuner.current
        unforeseen = left - (room - before.device_bytes)
        self._corrections -= 1
        if left >= 0 >= unforeseen:
            self._corrections = 0  # within the target, and others use what was to spare
            return
        if unforeseen > 0 and self._options.replayed:
            # What stays is then in memory of the recordings, for all of a step. This peak is of
            # steps that let go of it as gradients came.
            self._corrections = 0
            return
        self._limits = self._memory.limits(
            room + (int(unforeseen * _USE_OF_SLACK) if unforeseen > 0 else unforeseen)
        )
        policy = self._policy_for(self._share())
        if policy.modes == before.modes:
            self._corrections = 0
            return
        self._safe = False
        self._tuner.current = policy
        self.decided(f"{policy.reasons[-1]} (corrected by the measured peak)")

    def _share(self) -> float:
        return self._tuner.share if isinstance(self._tuner, RecomputeTuner) else 0.0

    def _policy_for(self, share: float) -> ActivationPolicy:
        assert self._limits is not None
        offload, recompute = self._options.offload, self._options.recompute_asked
        if not self.recomputes and recompute == "auto":
            recompute = False
        if self._options.replayed and offload == recompute == "auto":
            offload = False
        return decide(self._measured, self._limits, offload, recompute, share, self.streams())
