"""Host buffers of paged activations, taken again from step to step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ts_core.device import Event
from ts_core.errors import OutOfBudgetError
from ts_core.memory.arena import PinnedArena

TAG = "activations"
# A free buffer may be this much larger than what is asked for.
_FIT = 1.25


@dataclass
class HostBuffer:
    """One buffer.

    Attributes:
        bytes_h: uint8 [size], in the arena.
        last: event of the last copy from or to it; a later copy into it comes after.
    """

    bytes_h: torch.Tensor
    last: Event | None = None
    _sizes: tuple[int, ...] = ()
    _parts: tuple[list[torch.Tensor], list[int]] = field(default_factory=lambda: ([], []))

    def parts(self, sizes: tuple[int, ...], align: int) -> tuple[list[torch.Tensor], list[int]]:
        """Parts of these sizes one behind the other, and their first bytes: multiples of `align`.

        Made once for the same sizes, which come again from step to step.
        """
        if sizes != self._sizes:
            starts, end = [], 0
            for size in sizes:
                starts.append(end)
                end += -(-size // align) * align
            parts = [self.bytes_h[at : at + n] for at, n in zip(starts, sizes, strict=True)]
            self._sizes, self._parts = sizes, (parts, starts)
        return self._parts


class HostBuffers:
    """Buffers by size. `give` may be called from any thread, also by the garbage collector.

    Args:
        arena: where new ones come from.
        limit_bytes: the most bytes to hold, in use and free.
    """

    def __init__(self, arena: PinnedArena, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.free_bytes = 0
        self.allocations = 0
        self.refusals = 0
        self._arena = arena
        self._free: dict[int, list[HostBuffer]] = {}
        self._returned: deque[HostBuffer] = deque()
        self._lock = threading.RLock()

    def take(self, size: int) -> HostBuffer | None:
        """A buffer of at least `size` bytes; None when the limit or the system has no room."""
        with self._lock:
            self._collect()
            buffer = self._fitting(size)
            if buffer is None:
                self._make_room(size)
                buffer = self._new(size)
            return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Take a buffer back. Never blocks, and takes no lock."""
        self._returned.append(buffer)

    def provide(self, sizes: Sequence[int]) -> int:
        """Have free buffers for all of `sizes` at once, page-locked in one piece.

        Returns:
            How many of them the limit allowed.
        """
        with self._lock:
            self._collect()
            missing = []
            kept: list[HostBuffer] = []
            for size in sorted(sizes, reverse=True):
                buffer = self._fitting(size)
                if buffer is None:
                    missing.append(size)
                else:
                    kept.append(buffer)
            total = sum(-(-size // 64) * 64 for size in missing)
            if missing and (self.limit_bytes is None or total <= self.limit_bytes):
                self._arena.reserve(total)
            for size in missing:
                buffer = self._new(size)
                if buffer is None:
                    break
                kept.append(buffer)
            for buffer in kept:
                self._keep(buffer)
            return len(kept)

    def trim(self) -> int:
        """Give free buffers back to the arena; returns their bytes."""
        with self._lock:
            self._collect()
            freed = self.free_bytes
            self._free.clear()
            self.held_bytes -= freed
            self.free_bytes = 0
            return freed

    @property
    def used_bytes(self) -> int:
        """Bytes that pages hold now."""
        with self._lock:
            self._collect()
            return self.held_bytes - self.free_bytes

    def _collect(self) -> None:
        while self._returned:
            self._keep(self._returned.popleft())

    def _keep(self, buffer: HostBuffer) -> None:
        self._free.setdefault(buffer.bytes_h.numel(), []).append(buffer)
        self.free_bytes += buffer.bytes_h.numel()

    def _fitting(self, size: int) -> HostBuffer | None:
        if not self._free.get(size):
            larger = [other for other, buffers in self._free.items() if buffers and other > size]
            size, wanted = min(larger, default=0), size
            if size == 0 or size > _FIT * wanted:
                return None
        buffer = self._free[size].pop()
        self.free_bytes -= size
        return buffer

    def _make_room(self, size: int) -> None:
        """Before growing: free buffers that fit nothing make room, the largest first."""
        if self.free_bytes < size:
            return
        freed = 0
        for other in sorted(self._free, reverse=True):
            buffers = self._free[other]
            while buffers and freed < size:
                buffers.pop()  # a copy engine keeps it until its copies have finished
                freed += other
                self.free_bytes -= other
                self.held_bytes -= other

    def _new(self, size: int) -> HostBuffer | None:
        if self.limit_bytes is not None and self.held_bytes + size > self.limit_bytes:
            self.refusals += 1
            return None
        try:
            buffer = HostBuffer(self._arena.empty(size, torch.uint8, tag=TAG))
        except OutOfBudgetError:  # the tensor stays on the device, and the refusal is counted
            self.refusals += 1
            return None
        self.held_bytes += size
        self.allocations += 1
        return buffer
