"""Host time of OffloadAdamW per bucket, with arithmetic and copies left out.

    python packages/ts-core/benchmarks/optimizer_overhead.py [--buckets 198] [--eager]

The device is the host under the rules of a GPU: what is queued for it has no effect and takes no
time, so what is left is Python: of a gradient as it comes ("gradient"), of step() ("step", which
the device waits for), and of the threads that work behind it ("host worker", "device worker", CPU
time). State is where a split of a model somewhat too large for the GPU puts it: six buckets of ten
in device memory, two read and written over the link, two with the host. Times are medians of the
steps, in microseconds. Garbage collection is off.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ts_core import OffloadAdamW, _native
from ts_core.device.base import Event, Stream
from ts_core.device.host import CallingThread, HostDevice
from ts_core.optim import device_places, layout
from ts_core.transfer import CopyEngine

PLACES = ("resident",) * 6 + ("zero_copy",) * 2 + ("host",) * 2
SHAPE = (32, 32)
WARM_UP = 5


class Inert(HostDevice):
    """Work is queued by the calling thread, as on a GPU, and has no effect."""

    separate_memory = True

    def new_stream(self, name: str) -> Stream:
        return CallingThread()

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        return None

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        work()

    def host_wait(self, event: Event) -> None:
        event.synchronize()


def leave_arithmetic_out() -> None:
    """Kernels return at once."""
    norm = torch.ones((), dtype=torch.float64)
    torch._foreach_norm = lambda tensors, *_: [norm.clone() for _ in tensors]
    _native.adamw_step = lambda **_: None
    device_places.update_on_device = lambda *_, **__: None
    layout.SMALL_BYTES = 64  # or small parameters would share a bucket


def worker_seconds(optimizer: OffloadAdamW) -> tuple[float, float]:
    """CPU time so far of the threads for host and device updates, which are idle then."""
    pipeline = optimizer._updates.pipeline
    workers = (pipeline._host, pipeline._device)
    host, device = [worker.submit(time.thread_time).result() for worker in workers]
    return host, device


def step(optimizer: OffloadAdamW, params: list[torch.nn.Parameter]) -> tuple[float, ...]:
    """One step; seconds of its parts."""
    for param in params:
        param.grad = torch.full(SHAPE, 0.5)
    before = worker_seconds(optimizer)
    start = time.perf_counter()
    with torch.no_grad():  # as in a backward
        for param in params:
            optimizer._on_gradient(param)
    given = time.perf_counter()
    optimizer.step()
    stepped = time.perf_counter()
    optimizer.synchronize()
    after = worker_seconds(optimizer)
    for param in params:
        param.detach()  # reads wait no more
    return given - start, stepped - given, after[0] - before[0], after[1] - before[1]


def main() -> None:
    """Print a line per part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--buckets", type=int, default=198)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eager", action="store_true", help="updates during backward, no clipping")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    leave_arithmetic_out()
    params = [torch.nn.Parameter(torch.ones(SHAPE)) for _ in range(options.buckets)]
    device = Inert()
    settings: dict[str, Any] = {"max_grad_norm": None if options.eager else 1.0}
    optimizer = OffloadAdamW(
        params, device=device, copies=CopyEngine(device), mode="gpu", threads=1, **settings
    )
    optimizer.build()
    count = len(optimizer.buckets)
    optimizer.place_state((PLACES * count)[:count])
    found = [step(optimizer, params) for _ in range(WARM_UP + options.steps)][WARM_UP:]
    for name, each in zip(
        ("gradient", "step", "host worker", "device worker"), zip(*found, strict=True), strict=True
    ):
        print(f"{name:14} {statistics.median(each) / count * 1e6:7.1f} us per bucket")


if __name__ == "__main__":
    main()
