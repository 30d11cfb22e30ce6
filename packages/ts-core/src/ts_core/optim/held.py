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

    Args:
        device: of the gradients.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._held: deque[_Held] = deque()
        self._lock = threading.Lock()  # a forward in one thread, a backward in another
        self.size_bytes = 0

    def make_room(self, size_bytes: int, limit_bytes: int) -> None:
        """Let go of what has been read, and of the oldest until so many bytes more may be held."""
        with self._lock:
            while self._held and (
                self.size_bytes + size_bytes > limit_bytes or self._held[0].landed()
            ):
                self._let_go()

    def add(self, job: Future[Event | None], gradients: torch.Tensor) -> None:
        """An update that reads `gradients` was queued by this thread, on whose compute stream they
        were made."""
        held = _Held(job, gradients, self._device.compute_stream())
        with self._lock:
            self._held.append(held)
            self.size_bytes += held.size_bytes

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            while self._held:
                self._let_go()

    def _let_go(self) -> None:
        held = self._held.popleft()
        self.size_bytes -= held.size_bytes
        if held.job.exception() is not None:
            return  # it reads nothing; whoever reads its parameters gets the error
        event = held.job.result()
        if event is not None:
            edges.wait(self._device, held.stream, event)
