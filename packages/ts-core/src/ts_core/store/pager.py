"""Which paged blocks are on the device: loading ahead, evicting, and finding a block's weights.

The pager owns a ring of slots. Entering a block binds its weights to the slot that holds them and
makes the compute stream wait for the copy; the next blocks in the direction of travel are loaded
into the slots that are left. A slot is given to another block only behind an event that follows
everything queued so far on the compute stream, so nothing is overwritten while it is read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ts_core.device.base import Event
from ts_core.errors import StateError
from ts_core.interrupts import held_back
from ts_core.store.homes import DeferredLoad, TrainedHome
from ts_core.store.images import BlockImage
from ts_core.store.load_waits import LoadWaits
from ts_core.store.plain_mode import plain_mode
from ts_core.store.saved_views import SavedView
from ts_core.transfer import CopyEngine, Slot, SlotRing


@dataclass
class PagerStats:
    """Counters of the pager."""

    loads: int = 0
    load_bytes: int = 0
    demand_loads: int = 0


class ParamPager:
    """Streams the weights of some blocks through a ring of device slots.

    Args:
        images: by block index, in the order of the stack.
        copies: the engine whose host-to-device stream carries the blocks.
        slot_count: slots in the ring, at least 2 (1 works, without overlap).

    Raises:
        OutOfBudgetError: the device cannot hold the ring.
    """

    def __init__(
        self, images: Sequence[BlockImage], copies: CopyEngine, slot_count: int = 2
    ) -> None:
        self.images = {image.index: image for image in images}
        self.order = sorted(self.images)
        self.copies = copies
        self.stats = PagerStats()
        self.waits: LoadWaits | None = None  # set while waits for loads are timed
        slot_bytes = max((image.size_bytes for image in images), default=0)
        slot_count = min(slot_count, len(images))
        self.ring = SlotRing(copies.device, slot_bytes, slot_count)
        self._owner: dict[int, BlockImage] = {}
        self._bound: set[int] = set()
        self._uses: set[int] = set()
        self._clock = 0
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._adopt(images)

    def homes(self) -> list[TrainedHome]:
        """Of the trained weights among those it moves."""
        return [home for image in self.images.values() for home in image.homes]

    @plain_mode
    def enter(self, index: int, direction: int) -> None:
        """Called before a block computes, paged or not.

        Args:
            index: the block's position in the stack.
            direction: +1 in forward, -1 in backward.
        """
        with self._lock:
            self._check_open()
            image = self.images.get(index)
            if image is not None and (image.take_writes() or image.stale):
                self._drop(image)
            ahead = self._ahead(index, direction)
            room = len(self.ring.slots) - (image is not None)
            keep = {*ahead[:room], *([index] if image is not None else [])}
            if image is not None:
                self._count_use(image, direction)
                self._assign(image, keep)
            for other in ahead[:room]:  # before the wait below, which may be for an update
                self._load(self.images[other], keep)
            if image is not None:
                self._make_ready(image, keep)

    @plain_mode
    def leave(self, index: int) -> None:
        """Called after a block's forward: outside it, its weights are those of the host image."""
        with self._lock:
            image = self.images.get(index)
            if image is not None and index in self._bound:
                self._unbind(image)

    @plain_mode
    def new_pass(self) -> None:
        """Called before the model's forward: load the first blocks, anew.

        Writes through `.data` (PEFT's merge, say) leave no trace to notice, so no copy on the
        device outlives the pass it was made for.
        """
        with self._lock:
            self._check_open()
            self._empty()
            self._uses.clear()
            for index in self.order[: len(self.ring.slots)]:
                self._load(self.images[index], set())

    @plain_mode
    def require(self, image: BlockImage) -> Slot:
        """The slot that holds `image`, loaded and waited for; for reads outside `enter`."""
        with self._lock:
            self._check_open()
            if self.images.get(image.index) is not image:
                raise StateError(
                    f"block {image.index} changed place after the forward of this backward. Run "
                    f"backward before the next forward that follows step()."
                )
            return self._ready_slot(image, {image.index})

    @plain_mode
    def saved_view(self, tensor: torch.Tensor) -> SavedView | None:
        """A handle for a tensor that views a slot; None for any other tensor."""
        slot = self.ring.slot_of(tensor)
        if slot is None:
            return None
        image = self._owner.get(slot.index)
        if image is None:
            raise StateError(
                "a tensor views a streaming slot that no block owns. This is a fault in "
                "trainstream: please report it with the model's code."
            )
        start = slot.buffer.storage_offset() // tensor.element_size()
        offset = int(tensor.storage_offset()) - start
        leaf = image.plain_leaf_at(offset * tensor.element_size())
        if leaf is not None and leaf.version() != tensor._version:
            leaf = None  # a view that does not share the weight's count (of `.data`, say)
        return SavedView(
            self,
            image,
            tensor.dtype,
            offset,
            tensor.shape,
            tuple(int(step) for step in tensor.stride()),
            leaf,
            tensor._version,
        )

    @plain_mode
    def release_all(self) -> None:
        """Bind every block to its host image, so that reads outside a step see stable values."""
        with self._lock:
            self._uses.clear()
            for image in self.images.values():
                if image.stale:
                    self._drop(image)
                elif image.index in self._bound:
                    self._unbind(image)

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held while copies are started and weights bound."""
        return self._lock

    def reading(self, image: BlockImage) -> list[Event]:
        """Events of copies that may still read the image; such as wait for an update are dropped.

        Called with `lock` held, before the image is written.
        """
        slot = self._slot_of(image)
        if slot is not None and isinstance(slot.ready, DeferredLoad) and slot.ready.waiting():
            self._forget_slot(image)
        loading = image.loading
        if loading is None or loading.query():
            image.loading = None
            return []
        return [loading]

    @plain_mode
    def invalidate(self, index: int) -> None:
        """The block's host image is about to be written: drop what a slot holds of it."""
        with self._lock:
            image = self.images.get(index)
            if image is not None:
                self._drop(image)

    def take_out(self, indices: Sequence[int], slot_count: int) -> list[BlockImage]:
        """Stop streaming blocks, between steps; their weights are bound to their host images.

        The ring is made anew when it needs other slots.

        Args:
            indices: paged blocks.
            slot_count: the most slots from now on.
        """
        with self._lock:
            self._check_open()
            self._empty()
            taken = [self.images.pop(index) for index in indices]
            for image in taken:
                image.forget_views()  # of slots, which would keep their memory
            self.order = sorted(self.images)
            self._fit_ring(slot_count)
            return taken

    def put_in(self, images: Sequence[BlockImage], slot_count: int) -> None:
        """Stream more blocks, between steps; the ring is made anew when it needs other slots.

        Raises:
            OutOfBudgetError: the device has no room for the ring; nothing has changed then but
                that the ring is as large as before.
        """
        with self._lock:
            self._check_open()
            self._empty()
            self.images.update((image.index, image) for image in images)
            self._adopt(images)
            self.order = sorted(self.images)
            try:
                self._fit_ring(slot_count)
            except BaseException:
                for image in images:
                    del self.images[image.index]
                self.order = sorted(self.images)
                self._fit_ring(slot_count)
                raise

    def close(self) -> None:
        """Bind everything to the host images and free the ring."""
        with self._lock:
            self._empty()
            self.copies.synchronize()
            for image in self.images.values():
                image.forget_views()
            self._closed = True
            self.ring.close()

    def _adopt(self, images: Sequence[BlockImage]) -> None:
        for image in images:
            for home in image.homes:
                home.pager = self

    def _fit_ring(self, slot_count: int) -> None:
        slot_bytes = max((image.size_bytes for image in self.images.values()), default=0)
        slot_count = min(slot_count, len(self.images))
        if (slot_bytes, slot_count) == (self.ring.slot_bytes, len(self.ring.slots)):
            return
        self.copies.synchronize()
        for image in self.images.values():
            image.forget_views()
            image.bind_host()
        self.ring.close()
        self.ring = SlotRing(self.copies.device, slot_bytes, slot_count)

    def _ahead(self, index: int, direction: int) -> list[int]:
        if direction > 0:
            return [other for other in self.order if other > index]
        return [other for other in reversed(self.order) if other < index]

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(
                "the model was unwrapped after the forward of this backward. Finish the backward "
                "before unwrap()."
            )
        if os.getpid() != self._process:
            raise StateError(
                "a wrapped model was used in a forked child process, which has none of the "
                "parent's copy threads. Use the model in the parent only, or start workers with "
                "the 'spawn' method."
            )

    def _make_ready(self, image: BlockImage, keep: set[int]) -> None:
        slot = self._ready_slot(image, keep)
        if image.index not in self._bound:
            with held_back:
                image.bind(slot.index, slot.buffer)
                self._bound.add(image.index)

    def _count_use(self, image: BlockImage, direction: int) -> None:
        if direction > 0 and image.homes and torch.is_grad_enabled():
            image.repeats = image.repeats or image.index in self._uses
            self._uses.add(image.index)

    def _assign(self, image: BlockImage, keep: set[int]) -> Slot:
        """The slot that holds the image, or that a copy of it is on its way to."""
        slot = self._slot_of(image)
        if slot is None:
            self.stats.demand_loads += 1
            slot = self._load(image, keep | {image.index})
            if slot is None:
                raise StateError(
                    f"block {image.index} needs a slot and all {len(self.ring.slots)} are in use."
                )
        return slot

    def _ready_slot(self, image: BlockImage, keep: set[int]) -> Slot:
        slot = self._assign(image, keep)
        self._clock += 1
        slot.last_use = self._clock
        if not slot.waited:
            assert slot.ready is not None
            try:
                with nullcontext() if self.waits is None else self.waits.around():
                    self.copies.wait_compute(slot.ready)
            except BaseException:
                self._drop(image)  # what a copy that failed left in the slot is never read
                raise
            slot.waited = True
        return slot

    def _load(self, image: BlockImage, keep: set[int]) -> Slot | None:
        present = self._slot_of(image)
        if present is not None:
            return present
        slot = self._free_slot(keep, image)
        if slot is None:
            return None
        with held_back:  # no copy is on its way to a slot that is nobody's
            self._evict(slot)
            behind = self.copies.record_compute()
            slot.ready = image.loading = self._copy(image, slot.buffer[: image.size_bytes], behind)
            image.stale = False
            slot.waited = False
            self._clock += 1
            slot.last_use = self._clock
            self._owner[slot.index] = image
        self.stats.loads += 1
        self.stats.load_bytes += image.size_bytes
        return slot

    def _copy(self, image: BlockImage, dst_d: torch.Tensor, behind: Event) -> Event:
        """Start the copy, or let it start when updates of the image's weights have run."""
        writers = [home.writer for home in image.homes if home.writer is not None]
        writers = [writer for writer in writers if not writer.landed()]
        if not writers:
            return image.source.load(self.copies, dst_d, behind)

        def start(written: Sequence[Event]) -> Event:
            return image.source.load(self.copies, dst_d, [behind, *written])

        return DeferredLoad(writers, start)

    def _free_slot(self, keep: set[int], image: BlockImage) -> Slot | None:
        """A slot whose block is not in `keep`; the block's own where it can be, so that its weights
        have the same addresses in every step (block replay).
        """
        candidates = [
            slot
            for slot in self.ring.slots
            if slot.index not in self._owner or self._owner[slot.index].index not in keep
        ]
        if not candidates:
            return None
        own = self.order.index(image.index) % len(self.ring.slots)
        return min(
            candidates,
            key=lambda slot: (slot.index != own, slot.index in self._owner, slot.last_use),
        )

    def _empty(self) -> None:
        for slot in self.ring.slots:
            self._evict(slot)

    def _evict(self, slot: Slot) -> None:
        image = self._owner.get(slot.index)
        if image is not None:
            self._drop(image)

    def _drop(self, image: BlockImage) -> None:
        """Bind to the host image and forget the slot's copy."""
        with held_back:
            self._unbind(image)
            self._forget_slot(image)
            image.stale = False

    def _unbind(self, image: BlockImage) -> None:
        with held_back:
            wrote = image.take_writes()
            image.bind_host()
            self._bound.discard(image.index)
            if wrote:
                self._forget_slot(image)

    def _forget_slot(self, image: BlockImage) -> None:
        slot = self._slot_of(image)
        if slot is not None:
            with held_back:
                slot.stop_filling()
                del self._owner[slot.index]

    def _slot_of(self, image: BlockImage) -> Slot | None:
        return next((s for s in self.ring.slots if self._owner.get(s.index) is image), None)
