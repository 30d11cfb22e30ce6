"""Segments of torch's CUDA allocator that grow.

torch asks the driver for memory in segments. What is free in an ordinary one lies between tensors
in pieces, and none of these serves a tensor that is larger: under a limit of a few GB, with single
tensors of nearly one, memory runs out with gigabytes free. A segment that grows
(`expandable_segments` among torch's settings) is one range of addresses behind which memory is put
where it is needed and taken from where it is free.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections.abc import Callable

import torch

from ts_core.device.own_streams import own_stream
from ts_core.memory.ram import in_wsl

# Where users say how torch allocates: in this order as torch reads them.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_NAMED = re.compile(r"\bexpandable_segments\s*:\s*(\w+)")
_PIECES = "near a limit memory may run out while much of it is free in pieces"
_LOCK = threading.Lock()
_DECIDED: list[str | None] = []  # at most one: it is for the whole process


def grow_segments(index: int) -> str | None:
    """Let torch's segments grow from here on, in the whole process and to its end.

    Not where the user has chosen in torch's own settings, nor where torch has no such segments.
    Other settings stay as they are. Nothing undoes it: memory that has been given out stays what
    it is, and other users of the allocator only gain by it.

    Args:
        index: the GPU that it is tried on.

    Returns:
        What was done, or why it was not, in words; None where the user needs not be told. The
        first answer stands.
    """
    with _LOCK:
        if not _DECIDED:
            _DECIDED.append(_decide(index))
        return _DECIDED[0]


def _decide(index: int) -> str | None:
    if torch.cuda.get_allocator_backend() != "native" or chosen() == "True":
        return None
    against = chosen_against() or unsupported()
    if against is not None:
        return f"device memory: torch's segments do not grow, since {against}; {_PIECES}"
    before = settings()
    try:
        _set(before, True)
        grows = _try_out(index)
        why = "memory that it gives out now is of the ordinary kind"
    except RuntimeError as error:  # of torch, or of a driver that cannot map memory so
        grows, why = False, str(error).splitlines()[0]
    if grows:
        return (
            "device memory: torch's segments grow from here on (expandable_segments), so that what "
            "is free does not lie in pieces"
        )
    try:
        _set(before, False)
    except RuntimeError as error:
        why = f"{why}; {str(error).splitlines()[0]}"
    return f"device memory: torch's segments do not grow, since torch refuses it ({why}); {_PIECES}"


def chosen() -> str | None:
    """What the user's settings say about segments that grow: "True", "False", or nothing."""
    for text in (settings(), *_variables().values()):
        found = _NAMED.search(text)
        if found is not None:
            return found[1]
    return None


def chosen_against() -> str | None:
    """Who has chosen ordinary segments, in words; None if nobody has."""
    value = chosen()
    if value in (None, "True"):
        return None
    names = [name for name, text in _variables().items() if _NAMED.search(text)]
    return f"{names[0] if names else 'a setting of torch'} says expandable_segments:{value}"


def unsupported() -> str | None:
    """Why torch's segments cannot grow here, in words; None if nothing is known against it."""
    if sys.platform == "win32":
        return "torch has no such segments on Windows"
    if torch.version.hip is not None:
        return "on ROCm that has not been tried"
    if in_wsl():
        return (
            "drivers under WSL may refuse the memory (PYTORCH_CUDA_ALLOC_CONF="
            "expandable_segments:True tries it)"
        )
    if _setter() is None:
        return f"torch {torch.__version__} has no function for it"
    return None


def settings() -> str:
    """torch's own text of the settings in force, or what the environment gave it."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # newer ones have it
    text = "" if read is None else str(read())
    return text or next(iter(_variables().values()), "")


def empty_cache() -> None:
    """`torch.cuda.empty_cache()`, once all GPUs are done with what was freed.

    Freeing an ordinary segment waits for that by itself. Before a segment that grows is unmapped,
    torch waits for the stream that it was allocated for: not for replays of graphs, which run on
    other streams, and in some versions not for another GPU than the current one.
    """
    for index in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(index):
            torch.cuda.synchronize(index)
    torch.cuda.empty_cache()


def _variables() -> dict[str, str]:
    found = {name: os.environ.get(name, "") for name in VARIABLES}
    return {name: text for name, text in found.items() if text.strip()}


def _setter() -> Callable[[str], object] | None:
    # The first calls in each version of torch what is right for CUDA there, until it is taken out.
    old = getattr(torch.cuda.memory, "_set_allocator_settings", None)
    return old or getattr(torch._C, "_accelerator_setAllocatorSettings", None)


def _set(before: str, grow: bool) -> None:
    """Add this to the settings: some versions of torch reset those that a new text leaves out."""
    setter = _setter()
    assert setter is not None
    kept = before.strip(" ,")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the function's own, of its end
        setter(f"{kept}{',' if kept else ''}expandable_segments:{grow}")


def _try_out(index: int) -> bool:
    """Whether memory comes from a segment that grows now.

    On a stream of its own, for which torch has nothing in store.
    """
    device = torch.device("cuda", index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a torch that was built without
        try:
            with torch.cuda.stream(own_stream(device, "segments")):
                probe = torch.empty(1, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return True  # nothing is left to try it with, which says nothing against it
    address = probe.data_ptr()
    grows = any(
        bool(segment.get("is_expandable"))
        for segment in torch.cuda.memory_snapshot()
        if segment["address"] <= address < segment["address"] + segment["total_size"]
    )
    del probe
    empty_cache()  # ordinary segments that are free would serve small tensors only
    return grows
