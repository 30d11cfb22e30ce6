"""The memory of a PagedKVCache, and the copies of its paged layers."""

from __future__ import annotations

import torch

from ts_core.device import Device, Event
from ts_core.engine.kv_cache_pages import (
    CacheStats,
    PagedLayer,
    PageLayout,
    Pair,
    ResidentLayer,
    Spread,
    copy_pair,
    next_in,
    tokens_of,
)
from ts_core.errors import OutOfBudgetError
from ts_core.memory.arena import default_arena
from ts_core.memory.ledger import Reservation
from ts_core.memory.ram import ram_available_bytes
from ts_core.transfer import CopyEngine, Slot, SlotRing

# The slots bound what is in flight; a lower bound would make the host wait.
_NO_INFLIGHT_LIMIT = 1 << 62
SLOTS = 2
RAM_SHARE = 0.9
TAG = "kv_cache"


def device_bytes(
    layout: PageLayout, layers: int, resident: int, max_tokens: int, contiguous: bool = False
) -> int:
    """Device memory of a cache with `resident` of its layers on the device."""
    paged = layers - resident
    whole = layout.token_bytes * max_tokens
    if not paged:
        return (resident + contiguous) * whole
    slot = max_tokens // layout.page_tokens * layout.page_bytes
    return (resident + 1) * whole + paged * layout.page_bytes + min(SLOTS, paged) * slot


class CacheMemory:
    """What a cache holds, and the copies of its paged layers."""

    def __init__(
        self,
        layout: PageLayout,
        device: Device,
        spread: Spread,
        max_tokens: int,
        stats: CacheStats,
        contiguous: bool = False,
    ) -> None:
        self.layout = layout
        self.device = device
        self.order = spread.paged
        self.stats = stats
        self._contiguous = contiguous
        self.device_bytes = device_bytes(
            layout, spread.count, spread.resident, max_tokens, contiguous
        )
        page_count = max_tokens // layout.page_tokens
        page_area = page_count * layout.page_bytes
        self.host_bytes = page_area * len(self.order)
        _check_ram(self.host_bytes)
        self._reservations: list[Reservation] = []
        self._ring: SlotRing | None = None
        self.pinned = device.separate_memory
        whole = layout.token_bytes * max_tokens
        try:
            self.resident = {
                layer: ResidentLayer(layout, self._take(whole), max_tokens)
                for layer in range(spread.count)
                if layer not in self.order
            }
            self._paged: dict[int, PagedLayer] = {}
            if self.order or contiguous:
                self._work = self._take(whole)
            if self.order:
                self._ring = SlotRing(device, page_area, min(SLOTS, len(self.order)))
                arena = default_arena()
                fallbacks = arena.stats()["arena_fallbacks"]
                for layer in self.order:
                    pages_h = arena.empty((page_area,), torch.uint8, tag=TAG)
                    self._paged[layer] = PagedLayer(pages_h, self._take(layout.page_bytes))
                self.pinned &= arena.stats()["arena_fallbacks"] == fallbacks
        except BaseException:
            self._release()
            raise
        self.copies = CopyEngine(device, _NO_INFLIGHT_LIMIT)
        self._owner: dict[int, tuple[int, int]] = {}  # slot -> layer, pages of it
        self._done: dict[int, Event] = {}  # slot -> after the last computation that used it
        self._stored: dict[int, Event] = {}  # slot -> its last copy to the host

    def append(self, layer: int, length: int, new: Pair, lengths: list[int]) -> Pair:
        """Add `new` to a layer that holds `length` tokens; everything the layer holds then."""
        resident = self.resident.get(layer)
        if resident is None:
            return self._append_to_pages(layer, length, new, lengths)
        views = resident.append(length, new)
        if not self._contiguous:
            return views
        everything = self.layout.whole(self._work, views[0].shape[2])
        copy_pair(everything, views)
        return everything

    def _append_to_pages(self, layer: int, length: int, new: Pair, lengths: list[int]) -> Pair:
        """`append` for a paged layer; contiguous."""
        layout, size = self.layout, self.layout.page_tokens
        state = self._paged[layer]
        total = length + new[0].shape[2]
        before, after = length // size, total // size
        everything = layout.whole(self._work, total)
        slot = self._slot_with(layer, before) if after else None
        if slot is not None and before:
            pages = layout.pages(slot.buffer, 0, before)
            copy_pair(layout.in_pages(everything, 0, before), pages)
        tail = layout.whole(state.tail_d, size)
        held = length - before * size
        copy_pair(tokens_of(everything, before * size, length), tokens_of(tail, 0, held))
        copy_pair(tokens_of(everything, length, total), new)
        if slot is not None and after > before:
            self._store(layer, slot, everything, before, after)
        kept = max(length, after * size)
        copy_pair(
            tokens_of(tail, kept - after * size, total - after * size),
            tokens_of(everything, kept, total),
        )
        if slot is not None:
            self._done[slot.index] = self.copies.record_compute()
        following = next_in(self.order, layer)
        if following != layer:
            self._load(following, lengths[following] // size, avoid=slot)
        return everything

    def crop(self, layer: int, length: int, kept: int) -> None:
        """Forget the tokens of a paged layer after `kept`."""
        size = self.layout.page_tokens
        before, after = length // size, kept // size
        state = self._paged[layer]
        if after < before:
            # The page that is open again was closed: bring it back into the tail.
            page = slice(after * self.layout.page_bytes, (after + 1) * self.layout.page_bytes)
            behind = [self.copies.record_compute(), state.stored]
            event = self.copies.h2d(state.tail_d, state.pages_h[page], after=behind)
            self.copies.wait_compute(event)
        for index, (owner, pages) in self._owner.items():
            if owner == layer:
                self._owner[index] = (layer, min(pages, after))

    def forget(self) -> None:
        """Nothing in a slot is valid any more."""
        self._owner.clear()

    def close(self) -> None:
        """Free everything; copies in flight have finished before."""
        self.copies.synchronize()
        self.device.compute_stream().synchronize()
        self._release()

    def _slot_with(self, layer: int, pages: int) -> Slot:
        """A slot that holds the first `pages` pages of `layer`, waited for."""
        slot = self._find(layer)
        if slot is None or self._owner[slot.index][1] != pages:
            if pages:
                self.stats.demand_loads += 1
            slot = self._load(layer, pages, avoid=None)
        assert slot is not None
        if not slot.waited and slot.ready is not None:
            self.copies.wait_compute(slot.ready)
            slot.waited = True
        return slot

    def _find(self, layer: int) -> Slot | None:
        assert self._ring is not None
        for slot in self._ring.slots:
            owner = self._owner.get(slot.index)
            if owner is not None and owner[0] == layer:
                return slot
        return None

    def _load(self, layer: int, pages: int, avoid: Slot | None) -> Slot | None:
        """Give `layer` a slot, if it has none with these pages, and queue their copy."""
        assert self._ring is not None
        slot = self._find(layer)
        if slot is not None and self._owner[slot.index][1] == pages:
            return slot
        if slot is None:
            free = [other for other in self._ring.slots if other is not avoid]
            if not free:
                return None
            slot = min(free, key=lambda other: (other.index in self._owner, other.last_use))
        self._owner[slot.index] = (layer, pages)
        slot.last_use = self.stats.updates
        # Without pages to load, a copy for an earlier owner may still be on its way into the slot:
        # `ready` stays, and is waited for before the slot is written.
        if pages:
            state = self._paged[layer]
            size = pages * self.layout.page_bytes
            # Behind what read the slot last, its copy to the host, and that of the layer's pages.
            behind = [self._done.get(slot.index), self._stored.get(slot.index), state.stored]
            slot.ready = self.copies.h2d(slot.buffer[:size], state.pages_h[:size], after=behind)
            slot.waited = False
            self.stats.loads += 1
            self.stats.load_bytes += size
        return slot

    def _store(self, layer: int, slot: Slot, everything: Pair, before: int, after: int) -> None:
        """Send pages before..after of `layer` to the host, by way of its slot."""
        layout = self.layout
        leaving = self._stored.get(slot.index)
        if leaving is not None and not leaving.query():
            self.copies.wait_compute(leaving)
        copy_pair(
            layout.pages(slot.buffer, before, after), layout.in_pages(everything, before, after)
        )
        area = slice(before * layout.page_bytes, after * layout.page_bytes)
        state = self._paged[layer]
        event = self.copies.d2h(
            state.pages_h[area], slot.buffer[area], after=self.copies.record_compute()
        )
        state.stored = self._stored[slot.index] = event
        self._owner[slot.index] = (layer, after)
        self.stats.stored_pages += after - before
        self.stats.store_bytes += (after - before) * layout.page_bytes

    def _take(self, size_bytes: int) -> torch.Tensor:
        self._reservations.append(self.device.pool.reserve(size_bytes, TAG))
        return self.device.allocate(size_bytes)

    def _release(self) -> None:
        self.resident = {}
        self._paged = {}
        self._work = torch.empty(0, dtype=torch.uint8)
        if self._ring is not None:
            self._ring.close()
        for reservation in self._reservations:
            reservation.release()


def _check_ram(needed: int) -> None:
    available = int(ram_available_bytes() * RAM_SHARE)
    if needed > available:
        raise OutOfBudgetError(
            f"the paged layers of this cache need {needed} bytes of host memory, and {available} "
            f"may be used: short by {needed - available}. Lower max_tokens or the batch, or keep "
            f"more layers on the device (resident_layers)."
        )
