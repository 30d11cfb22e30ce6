"""The share of a GPU that torch's allocator may take, where several owners set limits.

torch keeps one number for each GPU of the process. A limit holds until its owner ends it; then the
one set before it holds again, and after the last the share that was there at first.
"""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable

import torch

from ts_core.device import segments


class MemoryLimits:
    """Limits on one GPU.

    A share that somebody else has set meanwhile (`torch.cuda.set_per_process_memory_fraction`) is
    left as it is when an owner ends its limit.

    Args:
        total_bytes: of the GPU.
        read: the share in force.
        write: puts a share in force.
    """

    def __init__(
        self, total_bytes: int, read: Callable[[], float], write: Callable[[float], None]
    ) -> None:
        self._total_bytes = total_bytes
        self._read = read
        self._write = write
        self._held: dict[int, int] = {}  # by owner, the one in force last
        self._before = 1.0
        self._applied: float | None = None
        self._lock = threading.RLock()  # a finalizer may come while this thread holds it

    def put(self, owner: int, limit_bytes: int) -> None:
        """Limit the process to `limit_bytes` until `owner` ends it or another limit is set."""
        with self._lock:
            share = self._read()
            if share != self._applied:
                self._before = share
            self._held.pop(owner, None)
            self._held[owner] = limit_bytes
            self._apply(min(1.0, limit_bytes / self._total_bytes))

    def end(self, owner: int) -> None:
        """End the limit of `owner`, if it has one."""
        with self._lock:
            if self._held.pop(owner, None) is None:
                return
            if self._read() != self._applied:
                self._applied = None  # another share is in force, which is not ours to change
            elif self._held:
                last = next(reversed(self._held.values()))
                self._apply(min(1.0, last / self._total_bytes))
            else:
                self._write(self._before)
                self._applied = None

    def allowed_bytes(self) -> int:
        """What the process may take now, of all owners and whoever else sets the share."""
        return int(self._total_bytes * self._read())

    def _apply(self, share: float) -> None:
        self._write(share)
        self._applied = self._read()  # torch rounds it to bytes


_LIMITS: dict[int, MemoryLimits] = {}
_NUMBERS = itertools.count()


def limits_of(index: int) -> MemoryLimits:
    """Those of the GPU number `index`, one object for the whole process."""
    found = _LIMITS.get(index)
    if found is None:
        made = MemoryLimits(
            torch.cuda.get_device_properties(index).total_memory,
            lambda: torch.cuda.get_per_process_memory_fraction(index),
            lambda share: torch.cuda.set_per_process_memory_fraction(share, index),
        )
        found = _LIMITS.setdefault(index, made)
    return found


def end_with(owner: object, limits: MemoryLimits) -> int:
    """A number for `owner` to set limits by; they end with it at the latest."""
    number = next(_NUMBERS)
    weakref.finalize(owner, limits.end, number).atexit = False
    return number


def kept_by_graphs(index: int) -> int:
    """Bytes of GPU number `index` that recorded graphs keep for their replays, and nobody uses now.

    torch counts them as free, but gives them to nobody else.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return 0  # the other one tells nothing of its pools
    if _unused_in_pools(index):
        gc.collect()  # graphs that are gone
        segments.empty_cache()  # and what was theirs
    return _unused_in_pools(index)


def _unused_in_pools(index: int) -> int:
    return sum(
        int(segment["total_size"]) - int(segment["allocated_size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )
