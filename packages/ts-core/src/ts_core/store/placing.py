"""Building images where there is room for them: page-locked memory, pageable memory, disk."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ts_core.errors import NotAvailableError, OutOfBudgetError
from ts_core.memory.arena import PinnedArena
from ts_core.memory.budget import PageLockBudget
from ts_core.memory.heap import HeapTrimmer
from ts_core.memory.ram import ram_available_bytes
from ts_core.store.images import BlockImage, bytes_of, filled_image, image_over, lay_out
from ts_core.store.leaves import Leaf
from ts_core.store.sources import DiskSource, MemorySource, Source, StagedSource
from ts_core.store.staging import PART_BYTES, SLOT_COUNT, Stager
from ts_core.transfer import CopyEngine

if TYPE_CHECKING:
    from ts_core.store.disk import DiskFolder

_LEAST_PART_BYTES = 1 << 20
_GIB = 1 << 30
_SPARE_RAM_BYTES = 1 << 30


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of a model's images by where they are kept, and what has come from there.

    Attributes:
        memory: in memory that the device copies from itself.
        staged: in pageable memory, which is copied through a ring of page-locked slots.
        disk: in files.
        staged_read, disk_read: bytes that have come to the device from there.
    """

    memory: int = 0
    staged: int = 0
    disk: int = 0
    staged_read: int = 0
    disk_read: int = 0


class ImageStore:
    """Builds the images of one model's paged blocks, and takes them back.

    As many as the budget holds are page-locked, spread through the stack. The others go to files
    where a directory is given, else to pageable memory. On the host device, which copies from any
    memory, the budget decides only what goes to files. Trained weights never go to files.

    Args:
        copies: moves images to the device.
        arena: page-locked memory.
        budget: the most bytes of it for this process.
        directory: for files; None for none.
        log: told what went where, and why.
        memory_bytes: the most bytes of images in memory where there is a directory, as planned;
            None: as many as the budget holds.
        through_ring: whether what the device cannot copy itself goes through a ring of page-locked
            slots; None: on a device with memory of its own.
    """

    def __init__(
        self,
        copies: CopyEngine,
        arena: PinnedArena,
        budget: PageLockBudget,
        directory: str | os.PathLike[str] | None,
        log: Callable[[str], None],
        *,
        memory_bytes: int | None = None,
        through_ring: bool | None = None,
    ) -> None:
        self._copies = copies
        self._arena = arena
        self._budget = budget
        self._directory = directory
        self._log = log
        self._memory_bytes = memory_bytes
        separate = copies.device.separate_memory
        self._through_ring = separate if through_ring is None else through_ring
        self._stager: Stager | None = None
        self._folder: DiskFolder | None = None
        self._images: list[BlockImage] = []
        self._refused = 0
        self._said = ""  # why no block is on disk, last
        self._past_reads = {"memory": 0, "staged": 0, "disk": 0}

    def build(self, leaves: Mapping[int, Sequence[Leaf]]) -> list[BlockImage]:
        """Images of the blocks' leaves, which are bound to them; their old memory is freed.

        Files are written, all of them, before any weight is taken out of memory.

        Args:
            leaves: by block index.

        Raises:
            OutOfBudgetError: the disk is full, or the system has no memory.
            DataError: the disk cannot be written to.
            OptionError: the directory cannot be used.
        """
        if not leaves:
            self._report_no_disk()
            return []
        sizes = {index: lay_out(block)[1] for index, block in leaves.items()}
        if self._through_ring and self._stager is None:
            self._stager = self._make_stager(sizes)  # before the images take what may be locked
        beyond = self._beyond_budget(leaves, sizes)
        made: list[BlockImage] = []
        try:
            if beyond and self._directory is not None:
                made = self._in_files({index: leaves[index] for index in beyond}, sizes)
            on_disk = {image.index for image in made}
            trimmer = HeapTrimmer()  # what the weights leave must not be counted twice
            for image in made:
                image.bind_first()
                trimmer.read(image.size_bytes)
            for index, block in leaves.items():
                if index not in on_disk:
                    placements, size_bytes = lay_out(block)
                    source = self._memory(size_bytes, index in beyond, _is_trained(block))
                    made.append(filled_image(index, placements, source))
                    trimmer.read(size_bytes)
        except BaseException:
            self._take_back(made)
            if not self._images:
                self.close()
            raise
        self._images += made
        self._report()
        if self._stager is not None and not any(i.source.kind != "memory" for i in self._images):
            self._stager.close()  # its ring is free for others
            self._stager = None
        return sorted(made, key=lambda image: image.index)

    def forget(self, images: Sequence[BlockImage]) -> None:
        """Images whose weights have gone elsewhere: their memory, or room on disk, is free."""
        for image in images:
            self._images.remove(image)
            self._count_past(image)
            image.source.remove()
            image.homes = ()  # which know the image: else its memory waits for Python's collector

    def stored(self) -> StoredBytes:
        """Where the bytes are."""
        by_kind = {"memory": 0, "staged": 0, "disk": 0}
        read = dict(self._past_reads)
        for image in self._images:
            by_kind[image.source.kind] += image.size_bytes
            read[image.source.kind] += image.source.staged_bytes
        return StoredBytes(**by_kind, staged_read=read["staged"], disk_read=read["disk"])

    def blocks_in(self, kind: str) -> list[int]:
        """Blocks whose images are of that kind: "memory", "staged" or "disk"."""
        return sorted(image.index for image in self._images if image.source.kind == kind)

    def close(self) -> None:
        """Bring what is in files back to memory, as far as there is room, and remove the files.

        On a device with memory of its own weights go there next, and are read from the files then;
        so they do where memory lacks the room: a removed file lasts as long as a tensor reads it.
        """
        if self._stager is not None:
            self._stager.close()
            self._stager = None
        self._take_back(self._images)
        for image in self._images:
            self._count_past(image)
        self._images = []
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _take_back(self, images: Sequence[BlockImage]) -> None:
        on_disk = [image for image in images if image.source.kind == "disk"]
        left = 0
        if not self._copies.device.separate_memory:
            left = sum(image.size_bytes for image in on_disk if not _to_memory(image))
        for image in on_disk:
            image.source.remove()
        if left:
            self._log(
                f"disk_offload: {_in_words(left)} of weights stay in their (removed) files, since "
                f"memory has no room for them"
            )

    def _count_past(self, image: BlockImage) -> None:
        self._past_reads[image.source.kind] += image.source.staged_bytes

    # -- where each one goes -----------------------------------------------------------------

    def _beyond_budget(
        self, leaves: Mapping[int, Sequence[Leaf]], sizes: Mapping[int, int]
    ) -> set[int]:
        if not self._through_ring and self._directory is None:
            return set()
        kept = sum(image.size_bytes for image in self._images if image.source.kind == "memory")
        left = self._budget.size_bytes - max(self._arena.held_bytes, kept)
        if self._memory_bytes is not None and self._directory is not None:
            left = min(left, self._memory_bytes - kept)
        trained = [index for index, block in leaves.items() if _is_trained(block)]
        left -= sum(sizes[index] for index in trained)
        frozen = [index for index in leaves if index not in trained]
        return set(frozen) - set(within(frozen, sizes, left))

    def _make_stager(self, sizes: Mapping[int, int]) -> Stager:
        part_bytes = max(_LEAST_PART_BYTES, min(PART_BYTES, max(sizes.values()) // SLOT_COUNT))
        stager = Stager(
            self._copies, self._arena, part_bytes=part_bytes, direct=not self._through_ring
        )
        if not stager.page_locked:
            self._log(
                f"weights: no memory can be page-locked ({self._arena.refusal}); copies to the "
                f"device are several times slower"
            )
        return stager

    def _memory(self, size_bytes: int, beyond: bool, trained: bool) -> Source:
        if not beyond:
            buffer_h = self._arena.try_pinned(size_bytes, tag="weights")
            if buffer_h is not None:
                return MemorySource(buffer_h)
            self._refused += 1
        buffer_h = _pageable(size_bytes)
        if trained or self._stager is None or not self._stager.page_locked:
            return MemorySource(buffer_h)
        return StagedSource(buffer_h, self._stager)

    def _in_files(
        self, leaves: Mapping[int, Sequence[Leaf]], sizes: Mapping[int, int]
    ) -> list[BlockImage]:
        """Write all files; nothing is bound to them yet."""
        if not hasattr(os, "preadv"):
            raise NotAvailableError("disk_offload needs os.preadv, which this system lacks.")
        from ts_core.store.disk import DiskFolder

        assert self._directory is not None
        stager = self._stager = self._stager or self._make_stager(sizes)
        if self._folder is None:
            self._folder = DiskFolder(self._directory)
            for path in self._folder.removed:
                self._log(f"disk_offload: removed {path}, left by a process that is gone")
            if self._folder.in_memory:
                self._log(
                    f"disk_offload: {self._directory} is a file system in memory: nothing gained"
                )
        folder = self._folder
        folder.check_room(sum(sizes[index] for index in leaves))
        images: list[BlockImage] = []
        try:
            for index, block in leaves.items():
                placements, size_bytes = lay_out(block)
                parts = bytes_of(placements, size_bytes)
                file = folder.write(f"block-{index:04d}.bin", parts, size_bytes)
                images.append(image_over(index, placements, DiskSource(file, stager)))
        except BaseException:
            for image in images:
                image.source.remove()
            raise
        return images

    def _report_no_disk(self) -> None:
        """Where there is a directory and nothing in it: why."""
        if self._directory is None or self.blocks_in("disk"):
            return
        frozen = [image for image in self._images if not image.homes]
        why = f"the page-lock budget of {_in_words(self._budget.size_bytes)} has room for all"
        if not self._images:
            why = "none streams"
        elif not frozen:
            why = "those that stream hold trained weights, which stay in memory"
        elif len(frozen) < len(self._images):
            why += " but those that hold trained weights, which stay in memory"
        if why != self._said:
            self._said = why
            self._log(f"disk_offload: no block is on disk, since {why}")

    def _report(self) -> None:
        self._report_no_disk()
        stored = self.stored()
        if stored.staged == stored.disk == self._refused == 0:
            return
        why = f"the page-lock budget is {_in_words(self._budget.size_bytes)} ({self._budget.why})"
        if stored.disk and self._memory_bytes is not None:
            why += f" and the plan has room for {_in_words(self._memory_bytes)} in memory"
        if self._refused:
            why = f"{self._arena.refusal}; {why}"
        places = [f"{len(self.blocks_in('memory'))} of {len(self._images)} paged blocks in memory"]
        if stored.staged:
            assert self._stager is not None
            places.append(
                f"{len(self.blocks_in('staged'))} in pageable memory ({_in_words(stored.staged)}), "
                f"copied through a ring of {_in_words(self._stager.ring_bytes)}"
            )
        if stored.disk:
            assert self._folder is not None
            places.append(
                f"{len(self.blocks_in('disk'))} in {self._folder.path} ({_in_words(stored.disk)})"
            )
        self._log(f"weights: {', '.join(places)}, since {why}")


def within(candidates: Sequence[int], sizes: Mapping[int, int], limit_bytes: int) -> list[int]:
    """As many of `candidates` as `limit_bytes` holds, spread evenly among them."""
    for count in range(len(candidates), 0, -1):
        chosen = [candidates[(2 * k + 1) * len(candidates) // (2 * count)] for k in range(count)]
        if sum(sizes[index] for index in chosen) <= limit_bytes:
            return chosen
    return []


def _in_words(size_bytes: int) -> str:
    if size_bytes < _GIB:
        return f"{size_bytes / (1 << 20):.1f} MiB"
    return f"{size_bytes / _GIB:.1f} GiB"


def _is_trained(leaves: Sequence[Leaf]) -> bool:
    return any(leaf.owner.requires_grad for leaf in leaves)


def _pageable(size_bytes: int) -> torch.Tensor:
    """Memory of its own from the system, given back as soon as the last tensor on it goes."""
    try:
        private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
        mapping = mmap.mmap(-1, size_bytes, **({"flags": private} if private else {}))
    except OSError as error:
        raise OutOfBudgetError(
            f"{size_bytes} bytes of host memory cannot be had: {error} ({ram_available_bytes()} "
            f"bytes of RAM are available). Use disk_offload, a smaller model, or free memory."
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _to_memory(image: BlockImage) -> bool:
    """Let every leaf have memory of its own; False, and nothing done, where there is no room."""
    if image.size_bytes + _SPARE_RAM_BYTES > ram_available_bytes():
        return False
    for placement in image.placements:
        placement.leaf.set(placement.leaf.get().clone())
    return True
