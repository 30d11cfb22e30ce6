"""Pages on their way: what a block saved goes to one host slice together, and comes back together.

A page is a range of a storage that a saved tensor covers. Pages that leave together lie one behind
the other in a slice of host memory and share one event; those that are fetched together share one
event too, and where they are neighbours in the slice they are one copy into one piece of device
memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ts_core.device import Event
from ts_core.engine.host_buffers import HostBuffer, HostBuffers
from ts_core.transfer import CopyEngine

# Pages begin at multiples of this, as tensors of their own would: kernels are chosen by it.
ALIGN = 256
# Neighbours are fetched as one piece up to this size. A piece is freed with the last of its pages,
# so this bounds what is held longer than needed; a copy of as much takes far longer than to launch.
PIECE_BYTES = 32 << 20
# What a block saves leaves in several batches when it is more than this share of what may be in
# flight, so that it need not all wait for the block to end; less than this never does.
_BATCH_SHARE = 0.25
_LEAST_BATCH_BYTES = 1 << 20


@dataclass
class PageStats:
    """Counters of pages.

    Attributes:
        pages, page_bytes: copied to the host.
        batches: of pages that were copied to the host together.
        reused: saved tensors whose page was there already.
        fetches, fetch_bytes: pages copied back to the device.
        fetch_batches: of pages that were copied back together.
        fetch_copies: pieces that these were copied in.
        late_fetches: pages whose copy back began only when their block ran backward.
        kept_for_ram: tensors that stayed because host memory had no room.
        no_room_ahead: blocks not fetched ahead because the device had no room.
    """

    pages: int = 0
    page_bytes: int = 0
    batches: int = 0
    reused: int = 0
    fetches: int = 0
    fetch_bytes: int = 0
    fetch_batches: int = 0
    fetch_copies: int = 0
    late_fetches: int = 0
    kept_for_ram: int = 0
    no_room_ahead: int = 0


class HostSlice:
    """A host buffer while pages lie in it; it goes back when the last of them has gone."""

    __slots__ = ("buffer", "buffers")

    def __init__(self, buffers: HostBuffers, buffer: HostBuffer) -> None:
        self.buffers = buffers
        self.buffer = buffer

    def __del__(self) -> None:
        self.buffers.give(self.buffer)


class Fetch:
    """Copies to the device that were queued together."""

    __slots__ = ("_waiting", "event")

    def __init__(self, event: Event) -> None:
        self.event = event
        self._waiting = -1

    def wait(self, copies: CopyEngine) -> None:
        """The calling thread's compute stream waits for them, once."""
        stream = copies.device.compute_key()
        if stream != self._waiting:
            copies.wait_compute(self.event)
            self._waiting = stream


class Page:
    """One range of bytes: on the device still (`source_d`), in host memory, or both.

    Attributes:
        size: bytes.
        serial: of the first block call that needs it.
        version, counter: of the saved tensor, and what shares its version counter.
        source_d: uint8 [size], the memory that was saved, until its copy is queued. It stays where
            host memory had no room, or the block failed.
        slice, at: where it lies in host memory, from that byte on.
        stored: event of the copy there.
        device_d, device_at: while backward needs it, the memory that holds it, from that byte on.
        fetch: the copies that bring it there; None for what had not left.
    """

    __slots__ = (
        "__weakref__",
        "_leaving",
        "_storage",
        "at",
        "counter",
        "device_at",
        "device_d",
        "fetch",
        "serial",
        "size",
        "slice",
        "source_d",
        "stored",
        "version",
    )

    def __init__(
        self, source_d: torch.Tensor, version: int, counter: torch.Tensor, serial: int
    ) -> None:
        self.size = source_d.numel()
        self.serial = serial
        self.version = version
        self.counter = counter
        # While a weak reference exists no other storage gets the same identity.
        self._storage = StorageWeakRef(source_d.untyped_storage())
        self._leaving: weakref.ref[torch.Tensor] | None = None
        self.source_d: torch.Tensor | None = source_d
        self.slice: HostSlice | None = None
        self.at = 0
        self.stored: Event | None = None
        self.device_d: torch.Tensor | None = None
        self.device_at = 0
        self.fetch: Fetch | None = None

    def still_here(self) -> torch.Tensor | None:
        """The memory that was saved, while something keeps it (a copy that goes on, say)."""
        if self.source_d is not None or self._leaving is None:
            return self.source_d
        return self._leaving()

    def leaves(self, to: HostSlice, at: int, stored: Event) -> None:
        """Its copy to the host has been queued."""
        assert self.source_d is not None
        self.slice, self.at, self.stored = to, at, stored
        self._leaving, self.source_d = weakref.ref(self.source_d), None


class PageTransfers:
    """Moves pages, several at once.

    Args:
        copies: the engine whose streams carry them.
        buffers: host memory.
    """

    def __init__(self, copies: CopyEngine, buffers: HostBuffers) -> None:
        self.copies = copies
        self.buffers = buffers
        self.stats = PageStats()
        self.device = copies.device.torch_device

    @property
    def batch_bytes(self) -> int:
        """So many bytes of pages leave without waiting for their block to end.

        Together with those in flight they keep to the limit on bytes in flight.
        """
        return max(_LEAST_BATCH_BYTES, int(_BATCH_SHARE * self.copies.max_leaving_bytes))

    def store(self, pages: Sequence[Page]) -> None:
        """Queue the copies of pages to the host; they stay where it has no room for all.

        The memory they come from is let go once the copies are done.
        """
        sizes = tuple(page.size for page in pages)
        buffer = self.buffers.take(slice_bytes(sizes)) if sizes else None
        if buffer is None:
            self.stats.kept_for_ram += len(sizes)
            return
        held = HostSlice(self.buffers, buffer)
        parts, starts = buffer.parts(sizes, ALIGN)
        pairs = [
            (part, page.source_d)
            for part, page in zip(parts, pages, strict=True)
            if page.source_d is not None
        ]
        after = [self.copies.record_compute(), buffer.last]
        buffer.last = stored = self.copies.d2h_all(pairs, after, self.batch_bytes)
        for page, start in zip(pages, starts, strict=True):
            page.leaves(held, start, stored)
        self.stats.pages += len(sizes)
        self.stats.page_bytes += sum(sizes)
        self.stats.batches += 1

    def fetch(self, pages: Iterable[Page]) -> list[Page]:
        """Bring the bytes of pages to the device; returns those that are there by this.

        Raises:
            torch.OutOfMemoryError: the device has no room; nothing has changed then.
        """
        here, absent = [], []
        for page in dict.fromkeys(pages):
            if page.device_d is None:
                source = page.still_here()
                if source is None:
                    absent.append(page)
                else:
                    here.append((page, source))
        pieces = _pieces(absent)
        memory = [self._memory(piece[-1].at + piece[-1].size - piece[0].at) for piece in pieces]
        for page, source in here:
            page.device_d, page.device_at, page.fetch = source, 0, None
        if absent:
            self._fetch(pieces, memory)
        return [*(page for page, _ in here), *absent]

    def _fetch(self, pieces: Sequence[Sequence[Page]], memory: Sequence[torch.Tensor]) -> None:
        """Queue the copies of neighbouring pages into `memory`."""
        pairs = []
        slices: dict[HostSlice, Event | None] = {}
        for piece, piece_d in zip(pieces, memory, strict=True):
            first = piece[0]
            assert first.slice is not None
            slices[first.slice] = first.stored
            bytes_h = first.slice.buffer.bytes_h
            pairs.append((piece_d, bytes_h[first.at : first.at + piece_d.numel()]))
        behind = self.copies.record_compute()  # until there the memory is in use
        event = self.copies.h2d_all(pairs, [behind, *slices.values()])
        fetch = Fetch(event)
        for held in slices:
            held.buffer.last = event
        for piece, piece_d in zip(pieces, memory, strict=True):
            for page in piece:
                page.device_d, page.device_at = piece_d, page.at - piece[0].at
                page.fetch = fetch
            self.stats.fetches += len(piece)
            self.stats.fetch_bytes += sum(page.size for page in piece)
        self.stats.fetch_copies += len(pieces)
        self.stats.fetch_batches += 1

    def _memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)


def slice_bytes(sizes: Iterable[int]) -> int:
    """Bytes of the host slice that holds pages of these sizes."""
    return sum(-(-size // ALIGN) * ALIGN for size in sizes)


def batches_of(sizes: Iterable[int], batch_bytes: int) -> list[int]:
    """Bytes of each slice that a block's pages go to, by their sizes in the order of saving."""
    found: list[int] = []
    waiting = placed = 0
    for size in sizes:
        waiting += size
        placed += slice_bytes((size,))
        if waiting >= batch_bytes:
            found.append(placed)
            waiting = placed = 0
    return [*found, placed] if placed else found


def _pieces(pages: Iterable[Page]) -> list[list[Page]]:
    """Pages that lie next to each other in one slice, together; of a slice the last come first."""
    slices: dict[HostSlice | None, list[Page]] = {}
    for page in pages:
        slices.setdefault(page.slice, []).append(page)
    found: list[list[Page]] = []
    for neighbours in slices.values():
        neighbours.sort(key=lambda page: page.at, reverse=True)
        piece: list[Page] = []
        for page in neighbours:
            end = page.at + slice_bytes((page.size,))
            size = piece[-1].at + piece[-1].size - page.at if piece else 0
            if not piece or end != piece[0].at or size > PIECE_BYTES:
                piece = []
                found.append(piece)
            piece.insert(0, page)
    return found
