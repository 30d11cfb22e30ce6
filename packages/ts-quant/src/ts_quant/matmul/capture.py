"""Which CUDA graph is being captured on a stream."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch


@cache
def _capture_info() -> tuple[Any, int]:
    """The driver's function (torch has loaded the driver already), and how many of its last
    arguments may be null."""
    library = ctypes.CDLL("libcuda.so.1")
    for name, unused in (("cuStreamGetCaptureInfo_v2", 3), ("cuStreamGetCaptureInfo_v3", 4)):
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes = [ctypes.c_void_p] * (3 + unused)
            function.restype = ctypes.c_int
            return function, unused
    raise OSError("libcuda.so.1 has no cuStreamGetCaptureInfo")


def capture_id(device: torch.device, stream: int) -> int:
    """A number that no other capture of the process has, or 0 outside captures.

    Where the driver cannot say, each call gives another number, so that nothing is shared.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return 0
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    try:
        function, unused = _capture_info()
        pointers = ctypes.byref(status), ctypes.byref(number)
        code = function(stream, *pointers, *[None] * unused)
    except OSError:
        code = -1
    if code == 0 and number.value:
        return number.value
    global _UNKNOWN
    _UNKNOWN -= 1
    return _UNKNOWN


_UNKNOWN = 0
