"""Give memory that was freed back to the system.

glibc keeps freed blocks of up to 32 MiB for later. While a model is read, or its weights are moved
into images, tensors that stay lie between buffers that go, so what is kept can reach the size of
the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


class HeapTrimmer:
    """Trims the heap each time `every_bytes` have been read or moved."""

    def __init__(self, every_bytes: int = 32 << 20) -> None:
        self._every = every_bytes
        self._since = 0

    def read(self, size_bytes: int) -> None:
        """Count `size_bytes`; trim when it is time."""
        self._since += size_bytes
        if self._since >= self._every:
            self._since = 0
            trim_heap()


def trim_heap() -> None:
    """Return free memory to the system, where the C library can (glibc)."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):  # not glibc: musl, macOS, Windows
        return None
