"""Recording as CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ts_core.device import segments
from ts_core.device.own_streams import own_stream
from ts_core.engine.replay.recorder import Recorded, Recorder
from ts_core.engine.replay.signature import NotReplayable

# Device memory that one capture may take from the driver, and what is worth giving back for it.
_SPARE = 256 << 20
_WORTH_FREEING = 32 << 20
# The torch from which a graph is counted out of its pool, however its capture ended.
_COUNTS_OUT = "2.14.0.dev0"
# Streams that some recorder has captured, in this process.
_CAPTURED: set[int] = set()
# torch (up to 2.12) keeps the seed and offset of all graphs of a GPU in one pair of tensors. A
# replay writes them and launches, without the interpreter's lock: one thread at a time.
_REPLAYING = threading.Lock()


class CudaGraph(Recorded):
    """One captured graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        with _REPLAYING:
            self._graph.replay()


class CudaRecorder(Recorder):
    """Captures on a stream of its own into one private pool.

    Other host threads copy and update meanwhile, so captures are of mode "thread_local": only the
    calling thread is held to what a capture allows. Nobody else queues on the captured stream
    (`own_stream`) but autograd's thread, since backward nodes run on the stream of their forward.
    Warming up uses another one, so that cuBLAS makes its workspace for the former inside the pool.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._warm = own_stream(device, "warm")
        self._stream = own_stream(device, "captured")
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._pool_bytes = 0
        self._made_workspaces = False

    @property
    def generator(self) -> torch.Generator:
        return torch.cuda.default_generators[self._index]

    def warm_up(self, work: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._warm.wait_stream(current)
        try:
            with torch.cuda.stream(self._warm):
                work()
        finally:
            # Not only behind it: what the work frees may be given to any stream afterwards.
            self._warm.synchronize()

    def record(self, work: Callable[[], None]) -> Recorded:
        torch.cuda.synchronize(self._device)
        self._own_workspaces()
        self._free_cached()
        held = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        with _no_collection():
            try:
                self._capture(graph, work)
            finally:
                self._end_of_capture()
        self._pool_bytes += max(0, torch.cuda.memory_reserved(self._device) - held)
        return CudaGraph(graph)

    def _capture(self, graph: torch.cuda.CUDAGraph, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                work()
            except NotReplayable:  # our own refusal, with the capture in order
                self._abandon(graph)
                raise
            except BaseException:
                self.broken = True
                self._abandon(graph)
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                self.broken = True
                self._leave(self._pool)
                raise

    def _end_of_capture(self) -> None:
        """Nothing that a capture began is on its way, or in force, afterwards.

        As a capture begins, torch (up to 2.12) writes the tensors with seed and offset of all
        graphs' random numbers, on the captured stream, behind which nobody waits. On a GPU that is
        busy with other work such a write may come late, over what the first replay writes there.
        """
        if self.broken:
            self._free_generator()
        else:
            self._stream.synchronize()

    def _free_generator(self) -> None:
        """After a capture that could not be ended: random numbers are drawn eagerly again.

        torch's generator (up to 2.12) takes itself to be captured until some capture ends well.
        """
        pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.stream(self._stream):
                nothing = torch.empty(1, device=self._device)
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                nothing.zero_()
                graph.capture_end()
            self._stream.synchronize()
        except RuntimeError:  # the error of the capture before says more, and is raised
            self._leave(pool)

    def place(self) -> Any:
        # The stream's handle, without an object for it: this is asked at every replay.
        return torch._C._cuda_getCurrentRawStream(self._index)

    def pool_bytes(self) -> int:
        return self._pool_bytes

    def forget(self) -> None:
        # Their memory may be unmapped from here on, for which nobody waits for the last replays.
        torch.cuda.synchronize(self._device)
        # torch gives a pool's memory back with its last graph, and then takes no graph for it.
        self._pool = torch.cuda.graph_pool_handle()
        self._pool_bytes = 0
        self._made_workspaces = False

    def _free_cached(self) -> None:
        """Near the process's limit, give back what torch's allocator holds and does not use.

        It would do so itself when it runs out, but not while a stream is being captured.
        """
        held = torch.cuda.memory_reserved(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        limit = int(total * torch.cuda.get_per_process_memory_fraction(self._device))
        unused = held - torch.cuda.memory_allocated(self._device)
        if min(free, limit - held) < _SPARE and unused > _WORTH_FREEING:
            segments.empty_cache()

    def _own_workspaces(self) -> None:
        """See that cuBLAS's workspaces of captures lie in this recorder's pool.

        torch keeps one for each stream for good; one of earlier recordings, which are gone, would
        be freed under the feet of ours by whoever clears them.
        """
        if self._made_workspaces:
            return
        self._made_workspaces = True
        if self._stream.cuda_stream in _CAPTURED:
            torch._C._cuda_clearCublasWorkspaces()
        _CAPTURED.add(self._stream.cuda_stream)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture whose work raised; the driver then often calls the capture invalid."""
        try:
            graph.capture_end()
        except RuntimeError:  # the work's own error says more, and is raised
            self.broken = True
            self._leave(self._pool)

    def _leave(self, pool: Any) -> None:
        """After a capture that could not be ended: torch's allocator leaves the pool.

        torch (up to 2.13) then neither stops to allocate there nor counts that graph out of the
        pool, which would keep its memory to the end of the process.
        """
        try:
            torch._C._cuda_endAllocateToPool(self._index, pool)
        except RuntimeError:  # it had left it
            return
        if torch.__version__ < _COUNTS_OUT:
            torch._C._cuda_releasePool(self._index, pool)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Finalizers may ask for events, which a capturing thread must not."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
