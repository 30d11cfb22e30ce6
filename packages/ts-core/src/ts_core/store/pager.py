"""Which paged blocks are on the device: loading ahead, evicting, and finding a block's weights.

The pager owns a ring of slots. Entering a block binds its weights to the slot that holds them and
makes the compute stream wait for the copy; the next blocks in the direction of travel are loaded
into the slots that are left. A slot is given to another block only behind an event that follows
everything queued so far on the compute stream, so nothing is overwritten while it is read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ts_core.errors import StateError
from ts_core.store.images import BlockImage
from ts_core.transfer import CopyEngine, Slot, SlotRing


@dataclass(frozen=True)
class SavedView:
    """What autograd keeps instead of a tensor that views a slot: how to find it again.

    `offset` counts elements from the start of the slot.
    """

    pager: ParamPager
    image: BlockImage
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """The same view, in whatever slot the block is in now (it is loaded if in none)."""
        slot = self.pager.require(self.image)
        empty = torch.empty(0, dtype=self.dtype, device=slot.buffer.device)
        start = slot.buffer.storage_offset() // empty.element_size()
        storage = slot.buffer.untyped_storage()
        return empty.set_(storage, start + self.offset, self.shape, self.stride)


@dataclass
class PagerStats:
    """Counters of the pager."""

    loads: int = 0
    load_bytes: int = 0
    demand_loads: int = 0
    reused: int = 0


class ParamPager:
    """Streams the frozen weights of some blocks through a ring of device slots.

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
        slot_bytes = max((image.size_bytes for image in images), default=0)
        slot_count = min(slot_count, len(images))
        self.ring = SlotRing(copies.device, slot_bytes, slot_count)
        self._slot_of: dict[int, Slot] = {}
        self._owner: dict[int, BlockImage] = {}
        self._bound: set[int] = set()
        self._clock = 0
        self._lock = threading.RLock()

    def enter(self, index: int, direction: int) -> None:
        """Called before a block computes, paged or not.

        Args:
            index: the block's position in the stack.
            direction: +1 in forward, -1 in backward.
        """
        with self._lock:
            image = self.images.get(index)
            ahead = self._ahead(index, direction)
            room = len(self.ring.slots) - (image is not None)
            keep = {*ahead[:room], *([index] if image is not None else [])}
            if image is not None:
                self._make_ready(image, keep)
            for other in ahead[:room]:
                self._load(self.images[other], keep)

    def require(self, image: BlockImage) -> Slot:
        """The slot that holds `image`, loaded and waited for; for reads outside `enter`."""
        with self._lock:
            return self._make_ready(image, {image.index})

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
        return SavedView(
            self,
            image,
            tensor.dtype,
            int(tensor.storage_offset()) - start,
            tensor.shape,
            tuple(int(step) for step in tensor.stride()),
        )

    def release_all(self) -> None:
        """Bind every block to its host image, so that reads outside a step see stable values."""
        with self._lock:
            for image in self.images.values():
                image.bind_host()
            self._bound.clear()

    def invalidate(self, index: int) -> None:
        """The block's host image was written: what a slot holds of it is stale."""
        with self._lock:
            image = self.images[index]
            slot = self._slot_of.get(index)
            if slot is not None:
                self._evict(slot)
            image.bind_host()
            self._bound.discard(index)

    def close(self) -> None:
        """Bind everything to the host images and free the ring."""
        with self._lock:
            self.copies.synchronize()
            self.release_all()
            for image in self.images.values():
                image.forget_views()
            self._slot_of.clear()
            self._owner.clear()
            self.ring.close()

    def _ahead(self, index: int, direction: int) -> list[int]:
        if direction > 0:
            ahead = [other for other in self.order if other > index]
            if not torch.is_grad_enabled():
                ahead += [other for other in self.order if other < index]
            return ahead
        return [other for other in reversed(self.order) if other < index]

    def _make_ready(self, image: BlockImage, keep: set[int]) -> Slot:
        slot = self._slot_of.get(image.index)
        if slot is None:
            self.stats.demand_loads += 1
            slot = self._load(image, keep | {image.index})
            if slot is None:
                raise StateError(
                    f"block {image.index} needs a slot and all {len(self.ring.slots)} are in use."
                )
        self._clock += 1
        slot.last_use = self._clock
        if not slot.waited:
            assert slot.ready is not None
            self.copies.wait_compute(slot.ready)
            slot.waited = True
        if image.index not in self._bound:
            image.bind(slot.index, slot.buffer)
            self._bound.add(image.index)
        return slot

    def _load(self, image: BlockImage, keep: set[int]) -> Slot | None:
        present = self._slot_of.get(image.index)
        if present is not None:
            self.stats.reused += 1
            return present
        slot = self._free_slot(keep)
        if slot is None:
            return None
        self._evict(slot)
        behind = self.copies.record_compute()
        slot.ready = self.copies.h2d(slot.buffer[: image.size_bytes], image.buffer_h, after=behind)
        slot.waited = False
        self._clock += 1
        slot.last_use = self._clock
        self._slot_of[image.index] = slot
        self._owner[slot.index] = image
        self.stats.loads += 1
        self.stats.load_bytes += image.size_bytes
        return slot

    def _free_slot(self, keep: set[int]) -> Slot | None:
        candidates = [
            slot
            for slot in self.ring.slots
            if slot.index not in self._owner or self._owner[slot.index].index not in keep
        ]
        if not candidates:
            return None
        return min(candidates, key=lambda slot: (slot.index in self._owner, slot.last_use))

    def _evict(self, slot: Slot) -> None:
        image = self._owner.pop(slot.index, None)
        if image is None:
            return
        del self._slot_of[image.index]
        image.bind_host()
        self._bound.discard(image.index)
