"""Gradient norms that a device has measured, on their way to the host without anyone waiting."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ts_core.device.base import Event
from ts_core.memory.arena import PinnedArena
from ts_core.optim.norms import judge
from ts_core.transfer import CopyEngine

SLOTS = 64


@dataclass
class NormReport:
    """The norm of one step.

    Attributes:
        norm: once it has come by and been looked at; None before.
    """

    _event: Event
    _slot: int
    _step: int
    _skips: bool
    norm: float | None = None


class NormReports:
    """Says which steps had gradients that are not finite, once their norms have come by.

    A norm crosses the link into a page-locked slot; later steps look which have arrived. Only when
    the device is SLOTS steps behind does the host wait for one.

    Args:
        copies: engine of the link.
        arena: where the slots come from.
        say: told of each norm that is not finite.
    """

    def __init__(self, copies: CopyEngine, arena: PinnedArena, say: Callable[[str], None]) -> None:
        self._copies = copies
        self._say = say
        self._slots_h = arena.empty((SLOTS,), torch.float32, tag="gradients")
        self._values = (ctypes.c_float * SLOTS).from_address(self._slots_h.data_ptr())
        self._awaited: deque[NormReport] = deque()
        self._next = 0

    def queue(self, norm: torch.Tensor, step: int, skips: bool) -> NormReport:
        """Send a norm on its way.

        Args:
            norm: 0-d fp32 on the device; not written again before it has been copied.
            step: that it belongs to.
            skips: whether the step is left out when the norm is not finite.

        Returns:
            Where it will be found; `wait` waits for it.
        """
        if len(self._awaited) == SLOTS:
            self._read(wait=True)
        slot, self._next = self._next, (self._next + 1) % SLOTS
        behind = self._copies.record_compute()
        event = self._copies.d2h(self._slots_h[slot : slot + 1], norm.view(1), after=behind)
        report = NormReport(event, slot, step, skips)
        self._awaited.append(report)
        return report

    def wait(self, report: NormReport) -> float:
        """The norm of a report, once the device has measured it; later work is not waited for."""
        while report.norm is None:
            self._read(wait=True)
        return report.norm

    def poll(self) -> None:
        """Report what has arrived; never waits."""
        while self._awaited and self._awaited[0]._event.query():
            self._read(wait=False)

    def flush(self) -> None:
        """Report everything; waits for it."""
        while self._awaited:
            self._read(wait=True)

    def _read(self, wait: bool) -> None:
        found = self._awaited[0]
        if wait:
            self._copies.device.host_wait(found._event)
        self._awaited.popleft()  # not before: Ctrl-C may end the wait
        found.norm = self._values[found._slot]
        judge(found.norm, "", None, found._skips, found._step, self._say)
