"""How fast weights come to the device from where they are kept, against one plain copy.

    python packages/ts-core/benchmarks/sources.py [--device cuda] [--block-mib 256] [--blocks 6]
        [--threads 4] [--directory DIR]

Blocks are loaded one after the other into two slots, as the pager does it, from page-locked memory
("memory"), pageable memory through the staging ring ("staged") and files, once with the system's
file cache dropped ("disk, cold") and once as left by the read before ("disk, cached"). On the host
device every source also goes through the ring, for comparison. Takes less than a minute.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import torch

from ts_core import _native
from ts_core.device import resolve_device
from ts_core.memory.arena import default_arena
from ts_core.store import disk
from ts_core.store.disk import DiskFile, DiskFolder
from ts_core.store.sources import DiskSource, MemorySource, Source, StagedSource
from ts_core.store.staging import Stager
from ts_core.transfer import CopyEngine, SlotRing

MIB = 1 << 20
PASSES = 3


def measure(
    copies: CopyEngine,
    ring: SlotRing,
    sources: Sequence[Source],
    before: Callable[[], None] = lambda: None,
) -> float:
    """GB/s of loading all sources in turn, the median of some passes."""
    rates = []
    for _ in range(PASSES):
        before()
        copies.synchronize()
        start = time.perf_counter()
        loads = []
        for index, source in enumerate(sources):
            slot = ring.slots[index % len(ring.slots)]
            loads.append(source.load(copies, slot.buffer, copies.record_compute()))
            if index >= 1:
                copies.wait_compute(loads[index - 1])
        for load in loads:
            load.synchronize()
        seconds = time.perf_counter() - start
        rates.append(sum(s.buffer_h.numel() for s in sources) / seconds / 1e9)
    return statistics.median(rates)


def plain_copy(copies: CopyEngine, size_bytes: int) -> float:
    """GB/s of `Tensor.copy_` from page-locked memory (host device: of one thread's memcpy)."""
    device = copies.device
    source = default_arena().empty(size_bytes, tag="benchmark")
    source.fill_(1)
    target = device.allocate(size_bytes)
    rates = []
    for _ in range(PASSES + 1):
        copies.synchronize()
        start = time.perf_counter()
        if device.separate_memory:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
        else:
            _native.copy_bytes(target.data_ptr(), source.data_ptr(), size_bytes, threads=1)
        rates.append(size_bytes / (time.perf_counter() - start) / 1e9)
    return statistics.median(rates[1:])


def drop_cache(files: Sequence[DiskFile]) -> None:
    """Have the system forget what it holds of the files in memory."""
    for file in files:
        descriptor = os.open(file.path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None, help="cuda, cuda:N or host")
    parser.add_argument("--block-mib", type=int, help="256 on a GPU, else 48")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--threads", type=int, default=disk.READ_THREADS, help="that read files")
    parser.add_argument("--directory", default=None, help="for the files; a temporary one if none")
    options = parser.parse_args()
    disk.READ_THREADS = options.threads

    device = resolve_device(options.device)
    copies, arena = CopyEngine(device), default_arena()
    block_mib = options.block_mib or (256 if device.separate_memory else 48)
    size_bytes = block_mib * MIB
    ring = SlotRing(device, size_bytes, 2)
    rows = [("plain copy", plain_copy(copies, size_bytes))]

    buffers = [arena.empty(size_bytes, tag="benchmark") for _ in range(options.blocks)]
    for buffer in buffers:
        buffer.random_(0, 256)
    rows.append(("memory", measure(copies, ring, [MemorySource(b) for b in buffers])))

    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        folder = DiskFolder(directory)
        files = [
            folder.write(f"{index}.bin", [buffer], size_bytes)
            for index, buffer in enumerate(buffers)
        ]
        del buffers
        arena.trim()
        pageable = [torch.ones(size_bytes, dtype=torch.uint8) for _ in range(2)]
        for direct in (False,) if device.separate_memory else (False, True):
            stager = Stager(copies, arena, direct=direct)
            way = "" if device.separate_memory else ", straight" if direct else ", through ring"
            if not direct:
                sources = [StagedSource(b, stager) for b in pageable] * (options.blocks // 2)
                rows.append((f"staged{way}", measure(copies, ring, sources)))
            on_disk = [DiskSource(file, stager) for file in files]
            cold = measure(copies, ring, on_disk, lambda: drop_cache(files))
            rows.append((f"disk, cold{way}", cold))
            rows.append((f"disk, cached{way}", measure(copies, ring, on_disk)))
            stager.close()
        folder.close()
    print(f"{device.torch_device}, {options.blocks} blocks of {block_mib} MiB")
    for name, rate in rows:
        print(f"{name:28} {rate:6.2f} GB/s  {rate / rows[0][1]:5.0%} of a plain copy")


if __name__ == "__main__":
    main()
