"""Filling device slots with bytes that the device cannot copy from itself.

Pageable memory and files go through a ring of page-locked slots: a thread has the next part put in
a slot, by all cores or by threads that read the file, and queues its copy to the device; a slot is
used again once its copy has finished. So reading a part and copying the one before happen at once,
and nobody holds a core while waiting. Where device memory is the host's (the host device), parts
are put straight into it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ts_core import _native
from ts_core.device.base import Event
from ts_core.errors import StateError
from ts_core.memory.arena import PinnedArena
from ts_core.transfer import CopyEngine, PendingCopy, edges
from ts_core.transfer.copies import After, events_of

PART_BYTES = 32 << 20
# WSL refuses to page-lock more than a few MiB at once.
SMALLER_PARTS = (8 << 20, 2 << 20)
SLOT_COUNT = 4
TAG = "staging"
# Reads begun and not waited for where no ring bounds them, so that cancelling does not take long.
_DIRECT_READS = 16


class Reader(Protocol):
    """The bytes of one image, a part at a time.

    Attributes:
        loaded_bytes: bytes of finished loads so far; the stager counts them.
    """

    loaded_bytes: int

    def start(self, target_h: torch.Tensor, offset: int) -> Sequence[Future[None]]:
        """Begin to put the bytes from `offset` on into `target_h` (uint8, filled wholly).

        Returns:
            What to wait for; empty when they are there already.
        """


class MemoryReader:
    """Copies from pageable memory with all usable cores."""

    def __init__(self, buffer_h: torch.Tensor) -> None:
        self.buffer_h = buffer_h
        self.loaded_bytes = 0

    def start(self, target_h: torch.Tensor, offset: int) -> Sequence[Future[None]]:
        source = self.buffer_h.data_ptr() + offset
        _native.copy_bytes(target_h.data_ptr(), source, target_h.numel())
        return ()


@dataclass
class _RingSlot:
    buffer_h: torch.Tensor
    read: Event | None = None  # the last copy out of it


@dataclass(frozen=True)
class _Job:
    pending: PendingCopy
    target_d: torch.Tensor
    reader: Reader
    after: tuple[Event, ...]


@dataclass
class _Part:
    slot: _RingSlot
    offset: int
    size_bytes: int
    filling: Sequence[Future[None]] = field(default_factory=tuple)


class Stager:
    """Fills device memory through a ring of page-locked slots, or directly.

    Args:
        copies: carries the parts on its host-to-device stream.
        arena: where the slots come from.
        part_bytes, slot_count: the ring; parts are made smaller where page-locking so much at once
            is refused, and lie in plain memory where page-locking is refused altogether.
        direct: put the bytes straight into the device's memory, which is the host's; None: do so
            on the host device.

    Attributes:
        part_bytes: bytes of a slot.
        page_locked: whether the slots are, where a GPU is in use; copies are slow otherwise.
    """

    def __init__(
        self,
        copies: CopyEngine,
        arena: PinnedArena,
        *,
        part_bytes: int = PART_BYTES,
        slot_count: int = SLOT_COUNT,
        direct: bool | None = None,
    ) -> None:
        self.direct = not copies.device.separate_memory if direct is None else direct
        self.part_bytes, self.page_locked = part_bytes, True
        slots: list[_RingSlot] = []
        if not self.direct:
            self.part_bytes, self.page_locked, slots = _make_ring(arena, part_bytes, slot_count)
        self._state = _State(copies, slots, self.part_bytes)
        self._work: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stop = weakref.finalize(self, self._work.put, None)
        self._lock = threading.Lock()

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring."""
        return sum(slot.buffer_h.numel() for slot in self._state.slots)

    def load(self, target_d: torch.Tensor, reader: Reader, after: After = None) -> PendingCopy:
        """Begin to fill `target_d` (uint8) with the reader's bytes, behind `after`.

        Loads are carried out one after the other, in the order asked for.

        Raises:
            StateError: the stager is closed.
        """
        if not self._stop.alive:
            raise StateError("weights were asked for after the model was unwrapped.")
        behind = events_of(after)
        if self.direct:  # a copy into the same memory may still be on its way
            behind.append(self._state.copies.record_h2d())
        job = _Job(PendingCopy(), target_d, reader, tuple(behind))
        with self._lock:
            if self._thread is None:
                work = _fill_directly if self.direct else _fill_through_ring
                self._thread = threading.Thread(
                    target=_serve,
                    args=(self._work, self._state, work),
                    name="trainstream-staging",
                    daemon=True,
                )
                self._thread.start()
        self._work.put(job)
        return job.pending

    def close(self) -> None:
        """Stop the thread; loads that were not cancelled are carried out first."""
        self._stop()
        if self._thread is not None:
            self._thread.join()
        self._state.slots.clear()


class _State:
    """What the thread works with; it must not keep the Stager alive."""

    def __init__(self, copies: CopyEngine, slots: list[_RingSlot], part_bytes: int) -> None:
        self.copies = copies
        self.slots = slots
        self.part_bytes = part_bytes
        self.next_slot = 0

    def take(self) -> _RingSlot:
        """The slot used longest ago, once the copy out of it has finished."""
        slot = self.slots[self.next_slot]
        self.next_slot = (self.next_slot + 1) % len(self.slots)
        if slot.read is not None:
            self.copies.device.host_wait(slot.read)
            slot.read = None
        return slot


def _make_ring(
    arena: PinnedArena, part_bytes: int, count: int
) -> tuple[int, bool, list[_RingSlot]]:
    """Bytes of a slot, whether slots are page-locked, and the slots."""
    for size_bytes in (part_bytes, *(s for s in SMALLER_PARTS if s < part_bytes)):
        buffers = []
        for _ in range(count):
            buffer_h = arena.try_pinned(size_bytes, tag=TAG)
            if buffer_h is None:
                break
            buffers.append(buffer_h)
        if len(buffers) >= 2:
            return size_bytes, True, [_RingSlot(buffer_h) for buffer_h in buffers]
    size_bytes = min(part_bytes, max(SMALLER_PARTS))
    plain = [torch.empty(size_bytes, dtype=torch.uint8) for _ in range(count)]
    return size_bytes, False, [_RingSlot(buffer_h) for buffer_h in plain]


_Fill = Callable[[_State, _Job], Event | None]


def _serve(work: queue.SimpleQueue[_Job | None], state: _State, fill: _Fill) -> None:
    while (job := work.get()) is not None:
        if job.pending.begin():
            _settle(state, job, fill)
        del job  # or a sleeping thread would keep its slot's memory alive


def _settle(state: _State, job: _Job, fill: _Fill) -> None:
    try:
        event = fill(state, job)
    except BaseException as error:
        job.pending.fail(error)  # it reaches whoever waits for the weights
        return
    if event is None:
        job.pending.abandon()
    else:
        job.reader.loaded_bytes += job.target_d.numel()
        job.pending.finish(event)


def _fill_through_ring(state: _State, job: _Job) -> Event | None:
    """Queue all parts; the event of the last, or None when cancelled in between."""
    total = job.target_d.numel()
    parts: deque[_Part] = deque()
    event: Event | None = None
    try:
        for offset in range(0, total, state.part_bytes):
            if job.pending.cancelled:
                return None
            size_bytes = min(state.part_bytes, total - offset)
            part = _Part(state.take(), offset, size_bytes)
            parts.append(part)
            edges.pause_thread()
            part.filling = job.reader.start(part.slot.buffer_h[:size_bytes], offset)
            # One slot less than there are: the one being copied out of must be another.
            while parts and (len(parts) > len(state.slots) - 2 or _filled(parts[0])):
                event = _queue(state, job, parts.popleft())
        while parts:
            event = _queue(state, job, parts.popleft())
        return event
    finally:
        wait([future for part in parts for future in part.filling])  # they write into the ring


def _filled(part: _Part) -> bool:
    return all(future.done() for future in part.filling)


def _queue(state: _State, job: _Job, part: _Part) -> Event:
    try:
        for future in part.filling:
            future.result()
    finally:
        wait(part.filling)
    edges.pause_thread()
    target_d = job.target_d[part.offset : part.offset + part.size_bytes]
    after = job.after if part.offset == 0 else None
    part.slot.read = state.copies.h2d(target_d, part.slot.buffer_h[: part.size_bytes], after=after)
    return part.slot.read


def _fill_directly(state: _State, job: _Job) -> Event | None:
    """Put all parts where they belong, in the host's own memory."""
    for event in job.after:
        state.copies.device.host_wait(event)
    filling: deque[Future[None]] = deque()
    try:
        for offset in range(0, job.target_d.numel(), state.part_bytes):
            if job.pending.cancelled:
                return None
            edges.pause_thread()
            target_h = job.target_d[offset : offset + state.part_bytes]
            filling.extend(job.reader.start(target_h, offset))
            while len(filling) > _DIRECT_READS:
                filling.popleft().result()
        for future in filling:
            future.result()
        edges.pause_thread()
    finally:
        wait(filling)
    return state.copies.record_compute()  # on the host device: done
