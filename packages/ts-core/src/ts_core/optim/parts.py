"""Sums of gradients in host memory, part by part, through buffers that are used again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch

from ts_core.device.base import Event
from ts_core.memory.arena import PinnedArena
from ts_core.transfer import CopyEngine

T = TypeVar("T")


class Submit(Protocol):
    """Queues work on a thread; the future has its result."""

    def __call__(self, work: Callable[[], T], /) -> Future[T]: ...


class PartSums:
    """Adds gradients of later backward passes to those that are in host memory already.

    Each part crosses the link into a buffer, is added by a worker thread, and the buffer serves the
    next one. Host memory for parts is bounded, whatever the number of passes.

    Args:
        copies: engine of the link.
        arena: where buffers come from; nothing is page-locked for them (they are made in backward).
        submit: queues work on the host thread of the updates, which keeps its order.
        limit_bytes: of buffers at once; one larger part is let through alone.
    """

    def __init__(
        self, copies: CopyEngine, arena: PinnedArena, submit: Submit, limit_bytes: int
    ) -> None:
        self._copies = copies
        self._arena = arena
        self._submit = submit
        self._limit_bytes = limit_bytes
        self._free: dict[int, list[torch.Tensor]] = {}
        self._busy: deque[tuple[Future[None], torch.Tensor]] = deque()
        self._held_bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Host memory of the buffers there are."""
        return self._held_bytes

    def add(self, sum_h: torch.Tensor, part_d: torch.Tensor, behind: Event) -> Future[None]:
        """Queue `sum_h += part_d`, which is final behind `behind`; waits if too much is queued.

        `sum_h` may be read once the future is done. Additions to one sum run in order.
        """
        with self._lock:
            buffer = self._take(part_d.numel() * part_d.element_size())
            part_h = buffer.view(part_d.dtype)
            arrived = self._copies.d2h(part_h, part_d, after=behind, made_here=True)

            def work() -> None:
                self._copies.device.host_wait(arrived)  # what came first has come by then, too
                with torch.no_grad():
                    sum_h.add_(part_h)

            job = self._submit(work)
            self._busy.append((job, buffer))
        return job

    def _take(self, size_bytes: int) -> torch.Tensor:
        while self._busy and (
            self._busy[0][0].done() or not (self._free.get(size_bytes) or self._room(size_bytes))
        ):
            job, buffer = self._busy[0]
            job.exception()  # waits; who needs the sum is told of an error
            self._busy.popleft()  # not before: Ctrl-C may end the wait
            self._free.setdefault(buffer.numel(), []).append(buffer)
        if self._free.get(size_bytes):
            return self._free[size_bytes].pop()
        if not self._room(size_bytes):  # buffers of other sizes lie idle
            self._held_bytes -= sum(size * len(found) for size, found in self._free.items())
            self._free.clear()
        self._held_bytes += size_bytes
        return self._arena.empty((size_bytes,), torch.uint8, tag="gradients", grow=False)

    def _room(self, size_bytes: int) -> bool:
        return self._held_bytes == 0 or self._held_bytes + size_bytes <= self._limit_bytes
