"""The link between host and device, page-locking, and the device's own memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from ts_bench.machine_rows import Row, size_of
from ts_core.device import Device
from ts_core.device.base import Stream
from ts_core.memory import PinnedArena

TIMES = 5
# Copies that are queued for one direction before the other's turn.
BURST = 8

Lane = tuple[Stream, Tensor, Tensor]  # stream, destination, source


def page_locking(device: Device, size_bytes: int, times: int = 2) -> Row:
    """Seconds per GiB of page-locked memory: our arena, and torch's allocator (cudaHostAlloc)."""
    torch.empty(1, device=device.torch_device)  # what starting CUDA takes is not meant
    kept: list[PinnedArena | Tensor] = []  # given back, memory would be found again
    ours, theirs = [], []
    note = "" if device.kind == "cuda" else "not page-locked without a GPU"
    for _ in range(times):
        arena = PinnedArena()
        begun = time.perf_counter()
        arena.reserve(size_bytes)
        ours.append(time.perf_counter() - begun)
        kept.append(arena)
        if device.kind == "cuda":
            note = arena.refusal or note
            begun = time.perf_counter()
            kept.append(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True))
            theirs.append(time.perf_counter() - begun)
    values = {}
    for name, found in (("arena", ours), ("torch pin_memory", theirs)):
        if found:
            values[name] = min(found) * 2**30 / size_bytes
            values[f"{name}, first"] = found[0] * 2**30 / size_bytes
    return Row(f"page-locking {size_of(size_bytes)}", "s/GiB", values, note)


def lanes(device: Device, size_bytes: int) -> tuple[Lane, Lane]:
    """A copy to the device and one from it, each with a stream and memory of its own."""
    arena = PinnedArena(slab=2 * size_bytes)
    up_h, down_h = (arena.empty(size_bytes, tag="measuring").fill_(1) for _ in range(2))
    up_d, down_d = (device.allocate(size_bytes).fill_(1) for _ in range(2))
    return (
        (device.new_stream("measured h2d"), up_d, up_h),
        (device.new_stream("measured d2h"), down_h, down_d),
    )


def queue(device: Device, used: tuple[Lane, ...], count: int) -> None:
    """Queue `count` copies on each lane."""
    for begin in range(0, count, BURST):
        for stream, target, source in used:
            device.copy_all([(target, source)] * min(BURST, count - begin), stream)


def page_locked(device: Device, size_bytes: int, queued_bytes: int) -> Row:
    """GB/s of page-locked copies: queued one behind the other, and one at a time."""
    up, down = lanes(device, size_bytes)
    device.compute_stream().synchronize()
    count = max(1, queued_bytes // size_bytes)

    def rate(used: tuple[Lane, ...], count: int) -> float:
        def copy() -> None:
            queue(device, used, count)
            for stream, _, _ in used:
                stream.synchronize()

        return len(used) * count * size_bytes / seconds(copy) / 1e9

    return Row(
        f"link, {size_of(size_bytes)} copies",
        "GB/s",
        {
            "H2D": rate((up,), count),
            "D2H": rate((down,), count),
            "both": rate((up, down), count),
            "one H2D": rate((up,), 1),
            "one D2H": rate((down,), 1),
        },
    )


def pageable(device: Device, size_bytes: int) -> Row:
    """GB/s of copies from and to memory that is not page-locked."""
    host = torch.ones(size_bytes, dtype=torch.uint8)
    there = device.allocate(size_bytes).fill_(1)
    device.compute_stream().synchronize()
    stream = device.new_stream("measured pageable")

    def rate(target: Tensor, source: Tensor) -> float:
        def copy() -> None:
            device.copy(target, source, stream)
            stream.synchronize()

        return size_bytes / seconds(copy) / 1e9

    values = {"H2D": rate(there, host), "D2H": rate(host, there)}
    return Row(f"pageable, {size_of(size_bytes)}", "GB/s", values)


def device_copy(device: Device, size_bytes: int) -> Row:
    """GB/s read and written by a copy within device memory."""
    source = torch.ones(size_bytes, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    stream = device.compute_stream()
    count = 10

    def copy() -> None:
        for _ in range(count):
            target.copy_(source)
        stream.synchronize()

    rate = 2 * count * size_bytes / seconds(copy) / 1e9
    return Row(f"device memory, copy of {size_of(size_bytes)}", "GB/s", {"read and written": rate})


def seconds(action: Callable[[], None]) -> float:
    """Median of a few calls after a first one."""
    action()
    found = []
    for _ in range(TIMES):
        begun = time.perf_counter()
        action()
        found.append(time.perf_counter() - begun)
    return median(found)
