"""CUDA streams that nobody else is given.

`torch.cuda.Stream()` hands out 32 streams in turn, so the same one comes again. That is harmless
for copies, which only wait for each other then, but not beside a capture: what another thread
queues on the stream that is being captured becomes a part of the graph instead of running. So
streams that threads use beside the caller's, and those that are captured, are made here.

A stream is used again by a later owner once its object is gone; none is destroyed, since torch
keeps cuBLAS's workspace (32 MiB on Hopper) for each stream that ever ran a product.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections import defaultdict, deque

import torch

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no waiting for the legacy stream, either way
# Without a lock, which a finalizer that runs in the middle would wait for: a deque needs none.
_FREE: dict[tuple[int, str], deque[int]] = defaultdict(deque)


class _Lease:
    """Lies in a stream's attributes, and goes with it.

    Not the stream itself is watched: torch (2.11 among others) frees a torch.cuda.Stream without
    clearing the weak references to it, which then never call back and point at freed memory.
    """


def own_stream(device: torch.device, role: str = "copies") -> torch.cuda.Stream:
    """A stream of its own for as long as the object lives.

    Args:
        device: the GPU.
        role: streams go from one owner to a later one of the same role only.

    Returns:
        The stream. Where the driver cannot be asked for one (ROCm), one of torch's.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        handle: int | None = _FREE[index, role].pop()
    except IndexError:
        handle = _create(index)
    if handle is None:
        return torch.cuda.Stream(device)
    stream = _wrap(handle, index)
    lease = _Lease()
    weakref.finalize(lease, _give_back, index, role, handle).atexit = False
    stream.trainstream_lease = lease  # type: ignore[attr-defined]
    return stream


def _give_back(index: int, role: str, handle: int) -> None:
    _FREE[index, role].append(handle)


def _wrap(handle: int, index: int) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(handle, device=torch.device("cuda", index))


def _create(index: int) -> int | None:
    """The driver's handle of a new stream."""
    if torch.version.hip is not None:
        return None
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    driver = ctypes.CDLL(name)
    found = ctypes.c_void_p()
    with torch.cuda.device(index):
        torch.cuda.current_stream().query()  # makes the context current in this thread
        status = driver.cuStreamCreate(ctypes.byref(found), _NON_BLOCKING)
    if status != 0 or found.value is None:
        raise RuntimeError(f"cuStreamCreate on GPU {index} failed with CUDA driver error {status}.")
    return found.value
