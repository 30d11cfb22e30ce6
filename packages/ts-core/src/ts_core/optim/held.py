"""Gradients in device memory that updates during backward still read, bounded."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from ts_core.device.base import Device, Event, Stream
from ts_core.transfer import edges


@dataclass(frozen=True)
class _Held:
    job: Future[Event | None]
    gradients: torch.Tensor
    stream: Stream  # that they were allocated for

    @property
    def size_bytes(self) -> int:
        return self.gradients.numel() * self.gradients.element_size()

    def landed(self) -> bool:
        if not self.job.done():
            return False
        event = None if self.job.exception() is not None else self.job.result()
        return event is None or event.query()


class HeldGradients:
    """Keeps gradients until the device's updates have read them, without the host waiting for it.

    Where more come than may be held, the stream that they were computed on waits for the oldest
    update, and its gradients are let go of: torch gives their memory to later work of that stream
    only. So a backward does not run ahead of its updates by more than the limit.

    Updates over the link, and those in device memory, are done in their order each; what the former
    still read is waited for first, since the latter are soon done.

    Args:
        device: of the gradients.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._link: deque[_Held] = deque()
        self._near: deque[_Held] = deque()
        self._lock = threading.Lock()  # a forward in one thread, a backward in another
        self.size_bytes = 0

    def make_room(self, size_bytes: int, limit_bytes: int) -> None:
        """Let go of what has been read, and of the oldest until so many bytes more may be held."""
        with self._lock:
            for lane in (self._near, self._link):
                while lane and lane[0].landed():
                    self._let_go(lane)
            while self.size_bytes + size_bytes > limit_bytes and (self._link or self._near):
                self._let_go(self._link or self._near)

    def add(
        self, job: Future[Event | None], gradients: torch.Tensor, over_link: bool = False
    ) -> None:
        """An update that reads `gradients` was queued by this thread, on whose compute stream they
        were made."""
        held = _Held(job, gradients, self._device.compute_stream())
        with self._lock:
            (self._link if over_link else self._near).append(held)
            self.size_bytes += held.size_bytes

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            for lane in (self._link, self._near):
                while lane:
                    self._let_go(lane)

    def _let_go(self, lane: deque[_Held]) -> None:
        held = lane[0]  # and stays there while we wait, which Ctrl-C may end
        if held.job.exception() is None:  # else it reads nothing; who reads its parameters is told
            event = held.job.result()
            if event is not None:
                edges.wait(self._device, held.stream, event)
        lane.popleft()
        self.size_bytes -= held.size_bytes
