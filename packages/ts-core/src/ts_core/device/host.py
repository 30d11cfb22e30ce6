"""A software accelerator: streams are worker threads, device memory a bounded pool in RAM.

It lets a machine with no GPU train with weights held quantized or on other storage, and it runs
every scheduling path with real concurrency.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable

import torch

from ts_core import _native
from ts_core.device.base import Device, Event, Stream, Timestamp
from ts_core.memory.ledger import Ledger

_STOP = None


class HostEvent:
    """Set by a worker thread; carries the first error raised before it on its stream."""

    def __init__(self) -> None:
        self._flag = threading.Event()
        self._error: BaseException | None = None

    def set(self, error: BaseException | None) -> None:
        """Mark the point as reached (called by the stream)."""
        self._error = error
        self._flag.set()

    def query(self) -> bool:
        return self._flag.is_set()

    def synchronize(self) -> None:
        self._flag.wait()
        if self._error is not None:
            raise self._error


class HostStream:
    """A FIFO of host work on its own thread, which sleeps while there is none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        state = _StreamState()
        self._state = state
        thread = threading.Thread(
            target=_drain,
            args=(self._work, weakref.ref(state)),
            name=f"trainstream-{name}",
            daemon=True,
        )
        thread.start()
        weakref.finalize(self, self._work.put, _STOP)

    def submit(self, work: Callable[[], None]) -> None:
        """Queue `work`; an exception it raises reaches whoever waits for a later event."""
        self._work.put(work)

    def wait_event(self, event: Event) -> None:
        self._work.put(event.synchronize)

    def record(self) -> Event:
        event = HostEvent()
        state = self._state
        self._work.put(lambda: event.set(state.error))
        return event

    def synchronize(self) -> None:
        self.record().synchronize()


class _StreamState:
    error: BaseException | None = None


def _drain(
    work: queue.SimpleQueue[Callable[[], None] | None],
    state_of: weakref.ref[_StreamState],
) -> None:
    # Weakly: once raised, an error holds the frames of those who waited, and they the stream. An
    # event that is queued holds the state until it is set.
    while (item := work.get()) is not _STOP:
        try:
            item()
        except BaseException as error:
            state = state_of()
            if state is not None and state.error is None:
                state.error = error
            del state
        del item  # or a sleeping stream would keep the tensors of its last copy alive


class HostTimestamp:
    """The clock when it was made: the host computes as it is called."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def seconds_since(self, earlier: HostTimestamp) -> float | None:
        return self.seconds - earlier.seconds


class CallingThread:
    """The compute stream of the host device: PyTorch operations run as they are called."""

    name = "compute"

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def record(self) -> Event:
        event = HostEvent()
        event.set(None)
        return event

    def synchronize(self) -> None:
        return None


class HostDevice(Device):
    """The machine's own processor and memory, used as an accelerator.

    The pool bounds what streaming holds: resident blocks and slots. Inputs, outputs, gradients
    and everything outside the blocks are ordinary CPU tensors.
    """

    kind = "host"
    separate_memory = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.pool = Ledger(None)
        self._compute = CallingThread()

    def new_stream(self, name: str) -> Stream:
        return HostStream(name)

    def compute_stream(self) -> Stream:
        return self._compute

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        assert isinstance(stream, HostStream)
        size_bytes = src.numel() * src.element_size()
        to, from_ = dst.data_ptr(), src.data_ptr()  # a tensor without memory raises here

        def work(_: tuple[torch.Tensor, torch.Tensor] = (dst, src)) -> None:
            _native.copy_bytes(to, from_, size_bytes)

        stream.submit(work)

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        assert isinstance(stream, HostStream)
        stream.submit(work)

    def delay(self, stream: Stream, seconds: float) -> None:
        if isinstance(stream, HostStream):
            stream.submit(lambda: time.sleep(seconds))
        else:
            time.sleep(seconds)

    def host_wait(self, event: Event) -> None:
        event.synchronize()

    def timestamp(self) -> Timestamp:
        return HostTimestamp()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        buffer = torch.empty(size_bytes + 256, dtype=torch.uint8)
        start = -buffer.data_ptr() % 256
        return buffer[start : start + size_bytes]

    def mapped(self, host: torch.Tensor) -> torch.Tensor | None:
        return host

    def usable_bytes(self) -> int | None:
        return self.pool.limit

    def set_limit(self, limit_bytes: int | None) -> None:
        self.pool.limit = limit_bytes

    def reset_peak(self) -> None:
        self.peaks += 1
        self.pool.reset_peak()

    def memory(self) -> dict[str, int]:
        return {
            "allocated": self.pool.used,
            "reserved": self.pool.used,
            "peak_allocated": self.pool.peak,
        }
