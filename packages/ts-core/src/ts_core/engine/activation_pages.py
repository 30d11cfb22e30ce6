"""Pages: saved activations whose bytes are in host memory between forward and backward.

A page holds the range of a storage that a saved tensor covers. It is copied out behind an event of
the compute stream when autograd saves the tensor, and fetched back a block or more ahead when
backward comes near. Handles keep a page alive, so it goes when autograd drops the last of them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ts_core.device import Event
from ts_core.engine.host_buffers import HostBuffer, HostBuffers
from ts_core.engine.saved_tensors import PLAIN_TYPES, SavedTensor, check_version
from ts_core.transfer import CopyEngine

# A tensor with gaps is paged with its whole storage, if that is at most this many times larger.
_STORAGE_SHARE = 4


@dataclass
class PageStats:
    """Counters of pages.

    Attributes:
        pages, page_bytes: copied to the host.
        reused: saved tensors whose page was there already.
        fetches, fetch_bytes: copied back to the device.
        late_fetches: of these, begun only when their block ran backward.
        kept_for_ram: tensors that stayed because host memory had no room.
        no_room_ahead: blocks not fetched ahead because the device had no room.
    """

    pages: int = 0
    page_bytes: int = 0
    reused: int = 0
    fetches: int = 0
    fetch_bytes: int = 0
    late_fetches: int = 0
    kept_for_ram: int = 0
    no_room_ahead: int = 0


class Page:
    """One range of bytes: `buffer` holds it, and `device_d` while backward needs it."""

    __slots__ = (
        "__weakref__",
        "buffer",
        "buffers",
        "counter",
        "device_d",
        "fetched",
        "serial",
        "size",
        "source",
        "storage",
        "stored",
        "version",
    )

    def __init__(
        self,
        buffers: HostBuffers,
        buffer: HostBuffer,
        size: int,
        serial: int,
        tensor: torch.Tensor,
    ) -> None:
        self.buffers = buffers
        self.buffer = buffer
        self.size = size
        self.serial = serial  # of the first block call that needs it
        self.version = tensor._version
        self.counter = _version_counter(tensor)
        # While a weak reference exists no other storage gets the same identity.
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.source: weakref.ref[torch.Tensor] | None = None
        self.stored: Event | None = None
        self.device_d: torch.Tensor | None = None
        self.fetched: Event | None = None

    def __del__(self) -> None:
        buffer = getattr(self, "buffer", None)
        if buffer is not None:
            self.buffers.give(buffer)


class SavedPage(SavedTensor):
    """What autograd keeps of a paged tensor."""

    __slots__ = ("call", "dtype", "offset", "page", "shape", "store", "stride")

    def __init__(
        self, store: PageStore, page: Page, call: BlockCall, tensor: torch.Tensor, offset: int
    ) -> None:
        self.store = store
        self.page = page
        self.call = call
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = offset

    def tensor(self) -> torch.Tensor:
        """The saved tensor, on the device again: same shape, strides and bits.

        Raises:
            RuntimeError: it was changed in place since it was saved (torch's own message).
        """
        return self.store.read(self)


class BlockCall:
    """One call of a block in forward, and the pages that its backward reads.

    Attributes:
        index: of the block.
        serial: grows from call to call.
        previous: the call before it in the same pass, which runs backward after it.
    """

    __slots__ = ("__weakref__", "index", "pages", "previous", "serial", "store")

    def __init__(
        self, store: PageStore, index: int, serial: int, previous: BlockCall | None
    ) -> None:
        self.store = store
        self.index = index
        self.serial = serial
        self.previous = previous
        self.pages: list[weakref.ref[Page]] = []

    def page(self, tensor: torch.Tensor) -> SavedPage | None:
        """The handle of a tensor that autograd saves; None for one that stays."""
        return self.store.save(self, tensor)

    def live_pages(self) -> list[Page]:
        """Its pages that a graph still needs, the last saved first, as backward reads them."""
        pages = [reference() for reference in reversed(self.pages)]
        return [page for page in pages if page is not None]

    def reached(self, _: torch.Tensor | None = None) -> None:
        """Backward has come to this call."""
        self.store.reach(self)


@dataclass
class Span:
    """What to do with one call of a block.

    Attributes:
        mode: "keep", "offload" or "recompute".
        call: of the page store.
        observe: to be called with every saved tensor, while measuring.
        watch_output: whether backward reaching the block's output starts a fetch.
    """

    mode: str
    call: BlockCall
    observe: Callable[[torch.Tensor], None] | None
    watch_output: bool


class PageStore:
    """The pages of a stack of blocks.

    Args:
        copies: the engine whose streams carry them.
        buffers: host memory.
        min_bytes: smaller tensors stay.
        prefetch_depth: paged block calls fetched ahead in backward.
    """

    def __init__(
        self,
        copies: CopyEngine,
        buffers: HostBuffers,
        min_bytes: int,
        prefetch_depth: int,
    ) -> None:
        self.buffers = buffers
        self.min_bytes = min_bytes
        self.prefetch_depth = prefetch_depth
        self.stats = PageStats()
        self.went_back = False  # whether a backward has come here since the pass began
        self._copies = copies
        self.device = copies.device.torch_device
        self._pages: weakref.WeakValueDictionary[Any, Page] = weakref.WeakValueDictionary()
        self._here: weakref.WeakSet[Page] = weakref.WeakSet()
        self._weights: set[int] = set()
        self._reached: BlockCall | None = None
        self._last: BlockCall | None = None
        self._serial = 0
        self._task = -1
        self._lock = threading.RLock()

    def new_pass(self, weights: Iterable[torch.Tensor]) -> None:
        """A forward of the model begins; storages of `weights` are never paged.

        Parameters whose class is another now (an update is in flight) are known by their class.
        """
        with self._lock:
            self._last = None
            self.went_back = False
            self._weights = {
                tensor.untyped_storage()._cdata for tensor in weights if type(tensor) in PLAIN_TYPES
            }

    def new_call(self, index: int) -> BlockCall:
        """A block is called."""
        with self._lock:
            self._serial += 1
            self._last = BlockCall(self, index, self._serial, self._last)
            return self._last

    def range_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """First byte and size of the part of its storage to page; None for a tensor that stays.

        Tensors that stay are on another device, small, sparse, parameters, views of parameters,
        broadcast (stride 0), or a small part of their storage.
        """
        size = tensor.numel() * tensor.element_size()
        if (
            size < self.min_bytes
            or size == 0
            or tensor.device != self.device
            or isinstance(tensor, torch.nn.Parameter)
            or isinstance(tensor._base, torch.nn.Parameter)
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return None
        storage = tensor.untyped_storage()
        if storage._cdata in self._weights:
            return None
        if tensor.is_contiguous() or _dense(tensor):
            return int(tensor.storage_offset()) * tensor.element_size(), size
        broadcast = any(
            stride == 0 and count > 1
            for stride, count in zip(tensor.stride(), tensor.shape, strict=True)
        )
        if broadcast or storage.nbytes() > _STORAGE_SHARE * size:
            return None
        return 0, storage.nbytes()

    def save(self, call: BlockCall, tensor: torch.Tensor) -> SavedPage | None:
        """Page a tensor that autograd saves in `call`; None when it stays."""
        covered = self.range_of(tensor)
        if covered is None:
            return None
        start, size = covered
        storage = tensor.untyped_storage()
        with self._lock:
            key = (storage._cdata, start, size, tensor._version)
            page = self._pages.get(key)
            if page is None:
                page = self._store(call, tensor, storage, start, size)
                if page is None:
                    return None
                self._pages[key] = page
            else:
                self.stats.reused += 1
            if not call.pages or call.pages[-1]() is not page:
                call.pages.append(weakref.ref(page))
        offset = int(tensor.storage_offset()) - start // tensor.element_size()
        return SavedPage(self, page, call, tensor, offset)

    def read(self, handle: SavedPage) -> torch.Tensor:
        """The tensor of a handle, on the device; the compute stream waits for it."""
        page = handle.page
        check_version(page.counter, page.version, tuple(handle.shape))
        with self._lock:
            self.reach(handle.call)
            if page.device_d is None:
                self.stats.late_fetches += self._fetch([page])
            if page.fetched is not None and not page.fetched.query():
                self._copies.wait_compute(page.fetched)
            assert page.device_d is not None
            empty = torch.empty(0, dtype=handle.dtype, device=self.device)
            start = page.device_d.storage_offset() // empty.element_size()
            storage = page.device_d.untyped_storage()
            if torch._C._current_graph_task_id() == -1:
                self._drop(page)  # a look from outside a backward
            return empty.set_(storage, start + handle.offset, handle.shape, handle.stride)

    def reach(self, call: BlockCall) -> None:
        """Backward has come to `call`: fetch its pages and those of the calls before it."""
        task = int(torch._C._current_graph_task_id())
        with self._lock:
            if task == -1 or self._reached is call:
                return
            self._reached = call
            self.went_back = True
            if task != self._task:
                self._task = task
                torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
            for page in list(self._here):
                if page.serial > call.serial:
                    self._drop(page)  # retained by the graph, but behind us
            self.stats.late_fetches += self._fetch(call.live_pages())
            ahead, nearby = 0, call.previous
            while nearby is not None and ahead < self.prefetch_depth:
                if nearby.pages:
                    if not self._fetch_ahead(nearby):
                        break
                    ahead += 1
                nearby = nearby.previous
            self._copies.retire()  # after the fetches, which may use what has not left yet

    def end_backward(self) -> None:
        """A backward has ended: pages that the graph still holds leave the device."""
        with self._lock:
            self._reached = None
            self._task = -1
            for page in list(self._here):
                self._drop(page)

    def _store(
        self, call: BlockCall, tensor: torch.Tensor, storage: Any, start: int, size: int
    ) -> Page | None:
        buffer = self.buffers.take(size)
        if buffer is None:
            self.stats.kept_for_ram += 1
            return None
        page = Page(self.buffers, buffer, size, call.serial, tensor)
        source = torch.empty(0, dtype=torch.uint8, device=self.device)
        source.set_(storage, start, (size,), (1,))
        after = [self._copies.record_compute(), buffer.last]
        page.stored = self._copies.d2h(buffer.bytes_h[:size], source, after=after)
        buffer.last = page.stored
        page.source = weakref.ref(source)
        self.stats.pages += 1
        self.stats.page_bytes += size
        return page

    def _fetch(self, pages: Iterable[Page]) -> int:
        """Bring the bytes of pages to the device; returns how many had to be copied.

        Raises:
            torch.OutOfMemoryError: the device has no room; nothing has changed then.
        """
        absent = []
        for page in pages:
            if page.device_d is not None:
                continue
            source = None if page.source is None else page.source()
            if source is not None:  # it has not left yet
                page.device_d, page.fetched = source, None
                self._here.add(page)
            else:
                absent.append((page, self._memory(page.size)))
        behind = self._copies.record_compute() if absent else None  # until there memory is in use
        for page, memory in absent:
            page.fetched = self._copies.h2d(
                memory, page.buffer.bytes_h[: page.size], after=[behind, page.stored]
            )
            page.device_d = memory
            page.buffer.last = page.fetched
            self._here.add(page)
            self.stats.fetches += 1
            self.stats.fetch_bytes += page.size
        return len(absent)

    def _fetch_ahead(self, call: BlockCall) -> bool:
        """Fetch a call's pages early; False when the device has no room for them yet."""
        try:
            self._fetch(call.live_pages())
        except torch.OutOfMemoryError:
            self.stats.no_room_ahead += 1
            return False
        return True

    def _memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _drop(self, page: Page) -> None:
        page.device_d = None
        self._here.discard(page)


def _version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor that shares the version counter of `tensor` but not its memory."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def _dense(tensor: torch.Tensor) -> bool:
    """Whether a permuted tensor covers a range of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
