"""The training forward that measures activations: how blocks run in it, and when it is repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ts_core.device.base import Device
from ts_core.engine.activation_meter import ActivationMeter, tensors_in
from ts_core.engine.activation_options import ActivationOptions
from ts_core.engine.activation_pages import PageStore
from ts_core.schedule.activation_policy import offload_named, recompute_named
from ts_core.schedule.plan import KEEP, OFFLOAD, RECOMPUTE

# An input this much larger than the one that was measured is measured again.
_LARGER = 1.02


class ActivationProbe:
    """A measurement that is under way, and the input of the last one.

    Args:
        options: what was asked for.
        device: the blocks compute on.
        count: blocks of the stack.
        store: tells what can be paged.

    Attributes:
        meter: of the measurement under way; None when there is none.
        numel: values of the largest argument of the last one.
    """

    def __init__(
        self, options: ActivationOptions, device: Device, count: int, store: PageStore
    ) -> None:
        self.meter: ActivationMeter | None = None
        self.numel = 0
        self._options = options
        self._device = device
        self._count = count
        self._store = store
        self._attempts = 0  # forwards that the probe under way has seen

    def begin(self) -> list[str]:
        """Measure in the next training forward; returns what becomes of each block's activations.

        Where something is left to decide, memory has not been shown to suffice, so on a device
        with memory of its own the probe recomputes every block: that needs the least memory, no
        host buffers of sizes unknown until then, and gives the peak that limits are counted from.
        """
        options, count = self._options, self._count
        free = KEEP
        if self._device.separate_memory:
            if options.recompute == "auto":
                free = RECOMPUTE
            elif options.offload == "auto":
                free = OFFLOAD
        modes = [free] * count
        if count and free == OFFLOAD:
            modes[-1] = KEEP
        for index in offload_named(options.offload, count):
            modes[index] = OFFLOAD
        for index in recompute_named(options.recompute_asked, count):
            modes[index] = RECOMPUTE
        self._attempts = 0
        self._start()
        if options.searches and self._device.separate_memory:
            self._device.reset_peak()
        return modes

    def drop(self) -> None:
        """Measure no more."""
        self.meter = None

    def finish(self, may_decide: Callable[[], bool]) -> ActivationMeter | None:
        """What the forward before this one measured, if it was a probe that ran to its end.

        Args:
            may_decide: whether a decision may follow; else the next forward measures again.
        """
        meter = self.meter
        assert meter is not None
        if not meter.finished:
            return None
        self._attempts += 1
        part = len(meter.finished) < self._count and self._attempts < 2
        if meter.broken or part or not may_decide():
            self._start()
            return None
        self.meter = None
        return meter

    def larger(self, args: Any, kwargs: Any) -> bool:
        """Whether a training forward has a larger input than was measured; notes what is measured.

        `numel` is still that of the last measurement then.
        """
        now = numel_in(args, kwargs)
        if self.meter is not None:
            self.numel = now
            return False
        return (
            now > self.numel * _LARGER and self._options.searches and self._device.separate_memory
        )

    def _start(self) -> None:
        self.meter = ActivationMeter(self._count, self._store)


def numel_in(args: Any, kwargs: Any) -> int:
    """Values of the largest tensor in these arguments."""
    return max((tensor.numel() for tensor in tensors_in((args, kwargs))), default=0)
