"""Host memory that the device can copy from and to: exact blocks out of a few large slabs.

With a GPU in use, slabs are mapped and then page-locked through the driver, which costs about a
tenth of what the CUDA runtime's own allocation does and takes the bytes asked for, not the next
power of two. Without one, or where page-locking is refused, the same interface hands out plain
memory, and says so in `pinned_stats()`.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ts_core import _native
from ts_core.errors import OptionError, OutOfBudgetError
from ts_core.memory.budget import limits_in_words
from ts_core.memory.ram import local_processes, ram_available_bytes, ram_limit_bytes

DEFAULT_SLAB_BYTES = 1 << 30
# Share of RAM that may be page-locked when no cap is given. The planner's budgets are tighter; this
# one keeps a mistake from taking the memory the system itself needs.
DEFAULT_CAP_FRACTION = 0.8
# A larger block gets a slab of its own, of exactly its size: filling shared slabs with blocks of
# half their size would waste as much as it uses.
OWN_SLAB_FRACTION = 1 / 8
# RAM left alone when a slab would be larger than the block that needs it.
_SPARE_RAM_BYTES = 1 << 30


class PinnedArena:
    """Carves tensors out of large host mappings, page-locked where a GPU is in use. Thread-safe.

    Args:
        slab: bytes a growing arena maps at once; 0 takes TRAINSTREAM_HOST_ARENA_SLAB (1 GiB).
        cap: the most bytes to page-lock; 0 for 80 % of RAM. Beyond it blocks are plain memory.
    """

    def __init__(self, slab: int = 0, cap: int = 0) -> None:
        self._host = _native.load()
        self._arena = self._host.Arena()
        self._lock = threading.Lock()
        self._slab = _checked_size("slab", slab) or _slab_from_environment()
        self._cap = _checked_size("cap", cap)
        self._fallbacks = 0
        self._refusal = ""
        # The least bytes that the driver refused to lock: asking again for as many, in vain, would
        # cost their page faults every time.
        self._refused_bytes: int | None = None

    def empty(
        self,
        shape: int | Sequence[int],
        dtype: torch.dtype = torch.uint8,
        *,
        tag: str = "other",
        grow: bool = True,
    ) -> torch.Tensor:
        """An uninitialized CPU tensor of exactly the bytes its shape needs, aligned to 64.

        The block goes back to the arena when the last tensor sharing its storage is gone; so keep
        one until the copies from or to it have finished (the arena knows nothing of streams).

        Args:
            shape: a size or sizes.
            dtype: any dtype.
            tag: what the bytes are for, in `pinned_stats()`.
            grow: False takes from the slabs there are, else plain memory, and never page-locks
                (which may wait for the device: not for backward passes).

        Raises:
            OutOfBudgetError: the system has no such memory.
            ValueError: a negative size, or a tag starting with "arena_" or "host_".
        """
        if tag.startswith(("arena_", "host_")):
            raise ValueError(f"tag={tag!r}: names starting with arena_ or host_ are taken")
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise ValueError(f"shape={sizes}: sizes must be >= 0")
        nbytes = math.prod(sizes) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(sizes, dtype=dtype)
        block = self._carve(nbytes, tag, grow)
        return torch.frombuffer(block, dtype=torch.uint8).view(dtype).view(sizes)

    def try_pinned(self, nbytes: int, *, tag: str) -> torch.Tensor | None:
        """Like `empty` for uint8 [nbytes], or None where page-locking it is refused.

        Without a GPU in use it is plain memory, and never None.

        Raises:
            OutOfBudgetError: the system has no such memory.
        """
        if nbytes <= 0 or not self._cuda_in_use():
            return self.empty(nbytes, tag=tag)
        with self._lock:
            block = self._arena.carve(nbytes, True, tag)
            if block is None and self._grow_pinned(nbytes):
                block = self._arena.carve(nbytes, True, tag)
        return None if block is None else torch.frombuffer(block, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> int:
        """Makes sure that one free range holds `nbytes`, in a new slab of that size if none does.

        Returns:
            Bytes newly mapped: 0, or `nbytes` rounded up to pages (not to a slab).

        Raises:
            OutOfBudgetError: the system has no such memory.
        """
        nbytes = _checked_size("bytes_now", nbytes)
        if nbytes == 0:
            return 0
        with self._lock:
            pinned = self._cuda_in_use()
            if pinned:
                self._pin_plain_slabs()
            stats = self._arena.stats()
            largest = stats["largest_free_pinned" if pinned else "largest_free"]
            if largest >= nbytes:
                return 0
            size = _to_pages(nbytes)
            if pinned and self._add_pinned(size, exactly=True):
                return size
            self._add_plain(size)
            return size

    def configure(self, *, cap: int = 0, slab: int = 0) -> None:
        """Changes the page-lock cap and the slab size of later growth; 0 leaves one as it is."""
        with self._lock:
            if _checked_size("cap", cap) and cap != self._cap:
                self._cap = cap
                self._forget_refusals()  # what the old cap refused may fit now
            self._slab = _checked_size("slab", slab) or self._slab

    def trim(self) -> int:
        """Gives wholly free slabs back to the system and returns their bytes.

        No copy from or to a block given back may still be in flight.
        """
        with self._lock:
            freed = int(self._arena.trim())
            if freed:
                self._forget_refusals()
            return freed

    def stats(self) -> dict[str, Any]:
        """What `pinned_stats()` returns, for this arena."""
        stats = self._arena.stats()
        return {
            **dict(sorted(stats["live_bytes"].items())),
            "arena_bytes": stats["slab_bytes"],
            "arena_used": stats["used_bytes"],
            "arena_slabs": stats["slabs"],
            "arena_cap": self.cap,
            "arena_fallbacks": self._fallbacks,
            "arena_largest_free": stats["largest_free"],
            "arena_pinned": stats["pinned_bytes"],
            "arena_refusal": self._refusal,
            "host_alloc_calls": stats["system_calls"],
        }

    @property
    def cap(self) -> int:
        """The most bytes that will be page-locked."""
        return self._cap or int(DEFAULT_CAP_FRACTION * ram_limit_bytes()) // local_processes()

    @property
    def held_bytes(self) -> int:
        """Page-locked bytes in use (where plain slabs lie beside them, at most so many)."""
        stats = self._arena.stats()
        if stats["pinned_bytes"] == stats["slab_bytes"]:
            return int(stats["used_bytes"])
        return int(stats["pinned_bytes"] - stats["largest_free_pinned"])

    @property
    def slab(self) -> int:
        """Bytes mapped at once when the arena grows."""
        return self._slab

    @property
    def refusal(self) -> str:
        """Why memory that should be page-locked is not; empty when nothing was refused."""
        return self._refusal

    # -- where a block comes from ------------------------------------------------------------

    def _carve(self, nbytes: int, tag: str, grow: bool) -> Any:
        with self._lock:
            pinned = self._cuda_in_use()
            block = self._arena.carve(nbytes, pinned, tag)
            if block is None and pinned:
                if grow and self._grow_pinned(nbytes):
                    block = self._arena.carve(nbytes, True, tag)
                else:
                    self._fallbacks += 1
                    block = self._arena.carve(nbytes, False, tag)
            if block is None:
                self._grow_plain(nbytes)
                block = self._arena.carve(nbytes, False, tag)
            return block

    def _grow_pinned(self, nbytes: int) -> bool:
        if self._pin_plain_slabs():
            stats = self._arena.stats()
            if stats["largest_free_pinned"] >= _to_alignment(nbytes):
                return True
        exact = _to_pages(nbytes)
        if nbytes > self._slab * OWN_SLAB_FRACTION:
            return self._add_pinned(exact, exactly=True)
        slab = _to_pages(max(self._slab, exact))
        return self._add_pinned(slab, exactly=False) or self._add_pinned(exact, exactly=True)

    def _forget_refusals(self) -> None:
        self._refusal = ""
        self._refused_bytes = None

    def _add_pinned(self, size: int, *, exactly: bool) -> bool:
        if self._refused_bytes is not None and size >= self._refused_bytes:
            return False
        locked = self._arena.stats()["pinned_bytes"]
        if locked + size > self.cap:
            if exactly:
                self._refusal = (
                    f"page-locking {size} bytes more would exceed the cap of {self.cap} bytes "
                    f"({locked} are locked)"
                )
            return False
        if not exactly and ram_available_bytes() < size + _SPARE_RAM_BYTES:
            return False
        threads = 0  # all usable cores
        device = torch.cuda.current_device()
        reason: str = self._arena.add_slab(size, True, device, threads, False)
        if reason:
            self._refusal = f"page-locking {size} bytes was refused: {reason}{limits_in_words()}"
            self._refused_bytes = size
        return not reason

    def _grow_plain(self, nbytes: int) -> None:
        # Untouched memory costs nothing, so slabs are as large as with a GPU; a block with a slab
        # of its own gives the memory back to the system when it goes.
        if nbytes > self._slab * OWN_SLAB_FRACTION:
            self._add_plain(_to_pages(nbytes), release_when_free=True)
        else:
            self._add_plain(_to_pages(max(self._slab, nbytes)))

    def _add_plain(self, size: int, *, release_when_free: bool = False) -> None:
        reason = self._arena.add_slab(size, False, 0, 0, release_when_free)
        if reason:
            raise OutOfBudgetError(
                f"{size} bytes of host memory cannot be had: {reason} ({ram_available_bytes()} "
                f"bytes of RAM are available). Use a smaller model or batch, or free memory."
            )

    def _pin_plain_slabs(self) -> bool:
        """Page-locks what was mapped before CUDA was in use; whether there was anything to lock."""
        stats = self._arena.stats()
        if stats["slab_bytes"] == stats["pinned_bytes"] or self._refusal:
            return False
        reason: str = self._arena.pin_slabs(self.cap, torch.cuda.current_device())
        if reason:
            self._refusal = (
                f"page-locking memory mapped earlier was refused: {reason}{limits_in_words()}"
            )
        return True

    @staticmethod
    def _cuda_in_use() -> bool:
        # Never the first to initialize CUDA: a process that only uses the host must not.
        return bool(torch.cuda.is_initialized())


_default: PinnedArena | None = None
_default_lock = threading.Lock()


def default_arena() -> PinnedArena:
    """The arena of this process, made on first use; a child of fork() makes its own."""
    global _default
    with _default_lock:
        if _default is None:
            _default = PinnedArena()
        return _default


def pinned_stats() -> dict[str, Any]:
    """Host memory of the process's arena.

    Returns:
        Live bytes by tag, and arena_bytes (mapped), arena_used (carved), arena_slabs, arena_cap
        (the most to page-lock), arena_fallbacks (blocks that should be page-locked and are not),
        arena_largest_free, arena_pinned (bytes page-locked), arena_refusal (why the last one was
        not, or ""), host_alloc_calls (mappings and page-lock calls made; constant in a steady
        state).
    """
    return default_arena().stats()


def reserve_pinned(bytes_now: int, cap: int = 0, slab: int = 0) -> int:
    """Reserves host memory up front, so that nothing is mapped or page-locked later.

    Args:
        bytes_now: bytes to have free in one piece; rounded up to pages, not to a slab.
        cap: the most bytes to page-lock from now on; 0 leaves it (at first 80 % of RAM).
        slab: bytes to map at once when the arena grows later; 0 leaves it.

    Returns:
        Bytes newly mapped: 0 when the arena had that much free.

    Raises:
        OutOfBudgetError: the system has no such memory.
        OptionError: a negative number.
    """
    arena = default_arena()
    arena.configure(cap=cap, slab=slab)
    return arena.reserve(bytes_now)


def parse_size(text: str) -> int:
    """Bytes in "4096", "512M", "1G" or "1GiB" (powers of 1024)."""
    match = re.fullmatch(r"\s*(\d+)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size: use a number of bytes, or one with K, M or G")
    return int(match[1]) << (10 * " KMGT".index(match[2].upper() or " "))


def _slab_from_environment() -> int:
    text = os.environ.get("TRAINSTREAM_HOST_ARENA_SLAB")
    if not text:
        return DEFAULT_SLAB_BYTES
    try:
        size = parse_size(text)
    except ValueError as error:
        raise OptionError(f"TRAINSTREAM_HOST_ARENA_SLAB: {error}") from None
    if size == 0:
        raise OptionError(f"TRAINSTREAM_HOST_ARENA_SLAB={text!r}: expected more than 0 bytes")
    return size


def _checked_size(name: str, size: int) -> int:
    if size < 0:
        raise OptionError(f"{name}={size}: expected a number of bytes >= 0")
    return size


def _to_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _to_alignment(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _forget_default_arena() -> None:
    global _default, _default_lock
    _default = None
    _default_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_default_arena)
