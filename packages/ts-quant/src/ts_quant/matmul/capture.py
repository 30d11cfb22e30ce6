"""Which CUDA graph is being captured on a stream."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch


@cache
def _driver() -> Any:
    """The CUDA driver; torch has loaded it already."""
    library = ctypes.CDLL("libcuda.so.1")
    function = library.cuStreamGetCaptureInfo_v2
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_void_p] * 3]
    function.restype = ctypes.c_int
    return function


def capture_id(device: torch.device, stream: int) -> int:
    """A number that no other capture of the process has, or 0 outside captures.

    Where the driver cannot say, each call gives another number, so that nothing is shared.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return 0
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    try:
        code = _driver()(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    except (OSError, AttributeError):
        code = -1
    if code == 0 and number.value:
        return number.value
    global _UNKNOWN
    _UNKNOWN -= 1
    return _UNKNOWN


_UNKNOWN = 0
