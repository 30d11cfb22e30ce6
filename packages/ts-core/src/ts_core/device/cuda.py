"""CUDA through torch's streams, events and caching allocator."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from ts_core import _native
from ts_core.device.base import Device, Event, Stream, Timestamp
from ts_core.device.limits import end_with, kept_by_graphs, limits_of
from ts_core.device.own_streams import own_stream
from ts_core.device.segments import grow_segments
from ts_core.errors import OutOfBudgetError
from ts_core.memory.ledger import Ledger

# torch's workspace for products of matrices, for each thread and stream: on Hopper and later, and
# on others. cuBLAS's variable asks for another, as ":KiB:count".
_LARGE_WORKSPACE = 32 << 20
_SMALL_WORKSPACE = (8 << 20) + (128 << 10)
_LT_WORKSPACE = 1 << 20  # of cuBLASLt, which adds a bias in the same kernel
_WORKSPACES = re.compile(r":(\d+):(\d+)")


class CudaStream:
    """A torch.cuda.Stream under the interface of `ts_core.device.base.Stream`."""

    def __init__(self, stream: torch.cuda.Stream, name: str) -> None:
        self.stream = stream
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and bool(other.stream == self.stream)

    def __hash__(self) -> int:
        return hash(self.stream)

    def wait_event(self, event: Event) -> None:
        self.stream.wait_event(event)  # type: ignore[arg-type]

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def synchronize(self) -> None:
        self.stream.synchronize()


class CudaTimestamp:
    """A timed event on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(torch.cuda.current_stream(device))

    def seconds_since(self, earlier: CudaTimestamp) -> float | None:
        if not (self.event.query() and earlier.event.query()):
            return None
        return float(earlier.event.elapsed_time(self.event)) / 1000


class _Bytes:
    """Host memory under the protocol by which torch takes memory that a GPU can read.

    Page-locked memory has one address for host and GPU.
    """

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": (host.numel() * host.element_size(),),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


_PEAKS: Counter[int] = Counter()  # resets by number of the GPU
_BEFORE_TRIAL: dict[int, int] = {}  # peak in bytes since the last reset, by number of the GPU


class CudaDevice(Device):
    """One CUDA GPU.

    A limit that is set here holds for the whole process, until `set_limit(None)` or the object's
    end.

    Args:
        index: the GPU's number; None for torch's current one.
    """

    kind = "cuda"
    separate_memory = True

    def __init__(self, index: int | None) -> None:
        torch.cuda.init()  # host memory is page-locked from here on
        self.index = torch.cuda.current_device() if index is None else index
        self.torch_device = torch.device("cuda", self.index)
        self.pool = Ledger(None)
        self._limit_bytes: int | None = None
        self._limits = limits_of(self.index)
        self._owner = end_with(self, self._limits)
        self._kept_by_graphs = kept_by_graphs(self.index)

    def new_stream(self, name: str) -> Stream:
        return CudaStream(own_stream(self.torch_device), name)

    def compute_stream(self) -> Stream:
        return CudaStream(torch.cuda.current_stream(self.torch_device), "compute")

    def compute_key(self) -> int:
        return int(torch.cuda.current_stream(self.torch_device).cuda_stream)

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        self.copy_all([(dst, src)], stream)

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        with torch.cuda.stream(stream.stream):  # entered once: it costs more than a copy's launch
            for dst, src in pairs:
                dst.copy_(src, non_blocking=True)

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        assert isinstance(stream, CudaStream)
        with torch.cuda.stream(stream.stream):
            work()

    def delay(self, stream: Stream, seconds: float) -> None:
        assert isinstance(stream, CudaStream)
        with torch.cuda.stream(stream.stream):
            torch.cuda._sleep(int(seconds * 1.5e9))

    def host_wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        _native.wait_event(event.cuda_event, device=self.index)

    def timestamp(self) -> Timestamp:
        return CudaTimestamp(self.torch_device)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.cuda.OutOfMemoryError as error:
            raise OutOfBudgetError(
                f"{size_bytes} bytes of device memory were asked for and are not free "
                f"({self.memory()}). Lower the batch size, page more blocks (param_offload=True) "
                f"or raise vram_limit."
            ) from error

    def take_workspaces(self) -> None:
        """Multiply something, forward and backward.

        torch then has its workspaces for the current stream, one for each thread that multiplies:
        this one and autograd's. They come from its allocator and stay.
        """
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cuda", enabled=False),
        ):
            x = torch.zeros(16, 16, dtype=torch.float32, device=self.torch_device)
            x.requires_grad_()
            product = torch.nn.functional.linear(x, x, x[0])
            torch.autograd.grad(product.sum(), x)

    def workspace_bytes(self) -> int:
        asked = _WORKSPACES.findall(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
        large = torch.cuda.get_device_capability(self.torch_device) >= (9, 0)
        each = _LARGE_WORKSPACE if large else _SMALL_WORKSPACE
        if asked:
            each = sum(int(kib) * int(count) << 10 for kib, count in asked)
        return 2 * (each + _LT_WORKSPACE)  # of this thread, and of autograd's

    def mapped(self, host: torch.Tensor) -> torch.Tensor | None:
        try:
            found = torch.as_tensor(_Bytes(host), device=self.torch_device)
        except RuntimeError:  # not page-locked, or by a driver without one address for both
            return None
        if found.data_ptr() != host.data_ptr():
            return None  # a copy: the memory belongs to another GPU's context
        return found.view(host.dtype).view(host.shape)

    def usable_bytes(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        usable = free + torch.cuda.memory_reserved(self.torch_device)
        allowed = self._limits.allowed_bytes() if self._limit_bytes is None else self._limit_bytes
        return max(0, min(usable, allowed) - self._kept_by_graphs)

    def grow_segments(self) -> str | None:
        return grow_segments(self.index)

    def set_limit(self, limit_bytes: int | None) -> None:
        if limit_bytes is None:
            self._limits.end(self._owner)
        else:
            self._limits.put(self._owner, limit_bytes)
        self._limit_bytes = limit_bytes

    @property
    def peaks(self) -> int:
        """How many times the GPU's peak was reset by any of these: the process has one."""
        return _PEAKS[self.index]

    @peaks.setter
    def peaks(self, count: int) -> None:
        _PEAKS[self.index] = count

    def reset_peak(self) -> None:
        self.peaks += 1
        _BEFORE_TRIAL.pop(self.index, None)
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    @contextmanager
    def trial(self) -> Iterator[None]:
        before, resets = self.memory()["peak_allocated"], self.peaks
        try:
            yield
        finally:
            torch.cuda.reset_peak_memory_stats(self.torch_device)
            if self.peaks == resets:  # else the peak was begun anew meanwhile
                _BEFORE_TRIAL[self.index] = before

    def memory(self) -> dict[str, int]:
        stats = torch.cuda.memory_stats_as_nested_dict(self.torch_device)  # once: it is read often
        allocated = stats["allocated_bytes"]["all"]
        return {
            "allocated": int(allocated["current"]),
            "reserved": int(stats["reserved_bytes"]["all"]["current"]),
            "peak_allocated": max(int(allocated["peak"]), _BEFORE_TRIAL.get(self.index, 0)),
        }
