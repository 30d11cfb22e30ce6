"""Paged activations: kept in host memory between forward and backward.

A page holds the range of a storage that a saved tensor covers. The pages of a block are copied out
together when its forward has ended, and fetched back together a block or more ahead when backward
comes near. Handles keep a page alive, so it goes when autograd drops the last of them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ts_core.engine.host_buffers import HostBuffers
from ts_core.engine.page_transfers import Page, PageTransfers
from ts_core.engine.saved_ranges import SavedRanges
from ts_core.engine.saved_tensors import SavedTensor, check_version
from ts_core.engine.turns import graph_task, in_backward
from ts_core.transfer import CopyEngine


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

    __slots__ = (
        "__weakref__",
        "index",
        "pages",
        "previous",
        "serial",
        "store",
        "waiting",
        "waiting_bytes",
    )

    def __init__(
        self, store: PageStore, index: int, serial: int, previous: BlockCall | None
    ) -> None:
        self.store = store
        self.index = index
        self.serial = serial
        self.previous = previous
        self.pages: list[weakref.ref[Page]] = []
        self.waiting: list[weakref.ref[Page]] = []  # saved here, and not on their way yet
        self.waiting_bytes = 0

    def page(self, tensor: torch.Tensor) -> SavedPage | None:
        """The handle of a tensor that autograd saves; None for one that stays."""
        return self.store.save(self, tensor)

    def end(self, failed: bool) -> None:
        """Its forward has ended: what it saved leaves the device, unless it failed."""
        if self.waiting:
            self.store.send(self, failed)

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
        self.prefetch_depth = prefetch_depth
        self.went_back = False  # whether a backward has come here since the pass began
        self.ranges = SavedRanges(copies.device.torch_device, min_bytes)
        self.transfers = PageTransfers(copies, buffers)
        self.stats = self.transfers.stats
        self.device = copies.device.torch_device
        self._copies = copies
        self._pages: weakref.WeakValueDictionary[Any, Page] = weakref.WeakValueDictionary()
        self._here: weakref.WeakSet[Page] = weakref.WeakSet()
        self._reached: BlockCall | None = None
        self._last: BlockCall | None = None
        self._serial = 0
        self._task = -1
        self._lock = threading.RLock()

    def new_pass(self, weights: Iterable[torch.Tensor]) -> None:
        """A forward of the model begins; storages of `weights` are never paged."""
        with self._lock:
            self._last = None
            self.went_back = False
            self.ranges.set_weights(weights)

    def new_call(self, index: int) -> BlockCall:
        """A block is called."""
        with self._lock:
            self._serial += 1
            self._last = BlockCall(self, index, self._serial, self._last)
            return self._last

    def save(self, call: BlockCall, tensor: torch.Tensor) -> SavedPage | None:
        """Page a tensor that autograd saves in `call`; None when it stays."""
        covered = self.ranges.of(tensor)
        if covered is None:
            return None
        start, size = covered
        storage = tensor.untyped_storage()
        key = (storage._cdata, start, size, tensor._version)
        with self._lock:
            page = self._pages.get(key)
            if page is None:
                source = torch.empty(0, dtype=torch.uint8, device=self.device)
                source.set_(storage, start, (size,), (1,))
                counter = self.ranges.version_counter(tensor)
                page = Page(source, tensor._version, counter, call.serial)
                self._pages[key] = page
                call.waiting.append(weakref.ref(page))
                call.waiting_bytes += size
            else:
                self.stats.reused += 1
            if not call.pages or call.pages[-1]() is not page:
                call.pages.append(weakref.ref(page))
            if call.waiting_bytes >= self.transfers.batch_bytes:
                self.send(call)
        offset = int(tensor.storage_offset()) - start // tensor.element_size()
        return SavedPage(self, page, call, tensor, offset)

    def send(self, call: BlockCall, failed: bool = False) -> None:
        """Copy to the host what waits in `call`; what a failed block saved stays where it is."""
        with self._lock:
            found = [reference() for reference in call.waiting]
            pages = [page for page in found if page is not None]
            call.waiting.clear()
            call.waiting_bytes = 0
            if pages and not failed:
                self.transfers.store(pages)

    def read(self, handle: SavedPage) -> torch.Tensor:
        """The tensor of a handle, on the device; the compute stream waits for it."""
        page = handle.page
        check_version(page.counter, page.version, tuple(handle.shape))
        with self._lock:
            self.reach(handle.call)
            if page.device_d is None:
                self._fetch([page], late=True)
            if page.fetch is not None:
                page.fetch.wait(self._copies)
            assert page.device_d is not None
            empty = torch.empty(0, dtype=handle.dtype, device=self.device)
            first = page.device_d.storage_offset() + page.device_at
            start = first // empty.element_size() + handle.offset
            storage = page.device_d.untyped_storage()
            if not in_backward():
                self._drop(page)  # a look from outside a backward
            return empty.set_(storage, start, handle.shape, handle.stride)

    def reach(self, call: BlockCall) -> None:
        """Backward has come to `call`: fetch its pages and those of the calls before it."""
        task = graph_task()
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
            self._fetch(call.live_pages(), late=True)
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

    def _fetch(self, pages: Iterable[Page], late: bool = False) -> None:
        before = self.stats.fetches
        self._here.update(self.transfers.fetch(pages))
        if late:
            self.stats.late_fetches += self.stats.fetches - before

    def _fetch_ahead(self, call: BlockCall) -> bool:
        """Fetch a call's pages early; False when the device has no room for them yet."""
        try:
            self._fetch(call.live_pages())
        except torch.OutOfMemoryError:
            self.stats.no_room_ahead += 1
            return False
        return True

    def _drop(self, page: Page) -> None:
        page.device_d = page.fetch = None
        self._here.discard(page)
