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


@dataclass(frozen=True)
class _Awaited:
    event: Event
    slot: int
    step: int
    skips: bool


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
        self._awaited: deque[_Awaited] = deque()
        self._next = 0

    def queue(self, norm: torch.Tensor, step: int, skips: bool) -> None:
        """Send a norm on its way.

        Args:
            norm: 0-d fp32 on the device; not written again before it has been copied.
            step: that it belongs to.
            skips: whether the step is left out when the norm is not finite.
        """
        if len(self._awaited) == SLOTS:
            self._read(wait=True)
        slot, self._next = self._next, (self._next + 1) % SLOTS
        behind = self._copies.record_compute()
        event = self._copies.d2h(self._slots_h[slot : slot + 1], norm.view(1), after=behind)
        self._awaited.append(_Awaited(event, slot, step, skips))

    def poll(self) -> None:
        """Report what has arrived; never waits."""
        while self._awaited and self._awaited[0].event.query():
            self._read(wait=False)

    def flush(self) -> None:
        """Report everything; waits for it."""
        while self._awaited:
            self._read(wait=True)

    def _read(self, wait: bool) -> None:
        found = self._awaited.popleft()
        if wait:
            self._copies.device.host_wait(found.event)
        judge(self._values[found.slot], "", None, found.skips, found.step, self._say)
