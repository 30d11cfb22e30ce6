"""A block's weights laid back to back in one host buffer, copied as one piece."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ts_core.device.base import Event
from ts_core.errors import StateError
from ts_core.memory.arena import PinnedArena
from ts_core.store.homes import TrainedHome
from ts_core.store.leaves import Leaf, is_dense, is_wrapper, tensor_leaves
from ts_core.store.sources import MemorySource, Source
from ts_core.store.unloaded import can_load, give_memory, values_of

ALIGNMENT = 256
HOST_KEY = -1
# Trained matrices stream when they hold at least this share of a block's matrices: less are
# adapters, which stay on the device.
TRAINED_SHARE = 1 / 4
# ... and each at least this share of the block's largest matrix: less is not worth a transfer.
LEAST_SHARE = 1 / 64


@dataclass(frozen=True)
class Placement:
    """Where a leaf lies in the image: byte offset, dtype, shape and strides."""

    leaf: Leaf
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The leaf's tensor inside `buffer` (uint8)."""
        element = torch.empty(0, dtype=self.dtype).element_size()
        flat = buffer[self.offset : self.offset + _numel(self.shape) * element].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


@dataclass
class BlockImage:
    """The paged bytes of one block.

    Attributes:
        index: the block's position in the stack.
        source: where its bytes are kept.
        placements: where each leaf lies.
        has_plain: whether there are weights that are not of a wrapper subclass.
        homes: of the trained weights.
        stale: a copy on the device may be older than the trained weights here.
        loading: event of the last copy that was started, until it is known to have ended.
        repeats: the block ran more than once in one forward.
    """

    index: int
    source: Source
    placements: tuple[Placement, ...]
    has_plain: bool
    homes: tuple[TrainedHome, ...] = ()
    stale: bool = False
    loading: Event | None = None
    repeats: bool = False
    _views: dict[int, tuple[list[torch.Tensor], list[int]]] = field(default_factory=dict)
    _pointers: list[int] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)
    _replaced: list[int] = field(default_factory=list)

    @property
    def buffer_h(self) -> torch.Tensor:
        """uint8 [size_bytes] in host address space; what a weight's value is."""
        return self.source.buffer_h

    @property
    def size_bytes(self) -> int:
        """Bytes of one copy of the block."""
        return self.buffer_h.numel()

    def host_view(self, position: int) -> torch.Tensor:
        """The leaf's tensor in the host image."""
        return self._views_of(HOST_KEY, self.buffer_h)[0][position]

    def bind(self, key: int, buffer: torch.Tensor) -> None:
        """Let every leaf read from `buffer`; views are made once per `key`."""
        views, pointers = self._views_of(key, buffer)
        for placement, view in zip(self.placements, views, strict=True):
            placement.leaf.set(view)
        self._pointers = list(pointers)
        self._versions = [placement.leaf.version() for placement in self.placements]
        for home in self.homes:
            home.bound(key == HOST_KEY)

    def bind_host(self) -> None:
        """Let every leaf read from the host image."""
        self.bind(HOST_KEY, self.buffer_h)

    def bind_first(self) -> None:
        """`bind_host` for the first time, when parameters may have had no memory yet."""
        for position, placement in enumerate(self.placements):
            if placement.leaf.attribute is None and placement.leaf.holder.is_meta:
                give_memory(placement.leaf.holder, self.host_view(position))
        self.bind_host()

    def bind_one_to_host(self, position: int) -> None:
        """Let one leaf read from the host image, whatever the others do."""
        views, pointers = self._views_of(HOST_KEY, self.buffer_h)
        if self._pointers[position] != pointers[position]:
            self.placements[position].leaf.set(views[position])
            self._pointers[position] = pointers[position]

    def plain_leaf_at(self, offset: int) -> Leaf | None:
        """The plain parameter whose bytes hold byte `offset`; None in a wrapper's."""
        number = bisect.bisect_right(self.placements, offset, key=lambda place: place.offset) - 1
        leaf = self.placements[number].leaf
        return leaf if leaf.attribute is None else None

    def note_version(self, position: int) -> None:
        """What has been written into a leaf until now is known."""
        self._versions[position] = self.placements[position].leaf.version()

    def mark(self, position: int) -> tuple[int, int]:
        """Differs after a write into a leaf, in place or by giving it another tensor."""
        return self.placements[position].leaf.version(), self._replaced[position]

    def take_writes(self) -> bool:
        """Bring what the user wrote into a weight since it was bound into the host image.

        Noticed are in-place operations (their version counter) and replaced tensors
        (`p.data = other`). Returns whether there were any: copies on the device are stale then.

        Raises:
            StateError: a weight was unfrozen, or replaced by one of another shape or dtype.
        """
        found = False
        for position, placement in enumerate(self.placements):
            leaf = placement.leaf
            if not leaf.trained and leaf.owner.requires_grad:
                raise StateError(
                    f"{leaf.name} of block {self.index} was frozen when the model was wrapped, and "
                    f"streams; it requires a gradient now. unwrap() the model, unfreeze, and wrap "
                    f"it again."
                )
            now = leaf.peek()
            replaced = now.data_ptr() != self._pointers[position]
            if not replaced and leaf.version() == self._versions[position]:
                continue
            if tuple(now.shape) != placement.shape or now.dtype != placement.dtype:
                raise StateError(
                    f"{leaf.name} of block {self.index} was replaced by a {now.dtype} tensor of "
                    f"shape {tuple(now.shape)}, while it streams as {placement.dtype} "
                    f"{placement.shape}. unwrap() the model before changing it, then wrap it again."
                )
            target = self.host_view(position)
            if target.data_ptr() != now.data_ptr():
                self._settle(position)
                target.copy_(now)
            self._replaced[position] += replaced
            found = True
        if found:
            self.source.wrote()
        return found

    def _settle(self, position: int) -> None:
        """Wait until an update in flight has written its values, before others take their place."""
        for home in self.homes:
            if home.position == position and home.writer is not None:
                event = home.writer.result()
                if event is not None:
                    event.synchronize()

    def _views_of(self, key: int, buffer: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
        cached = self._views.get(key)
        if cached is None:
            views = [placement.view(buffer) for placement in self.placements]
            cached = (views, [view.data_ptr() for view in views])
            self._views[key] = cached
        return cached

    def forget_views(self) -> None:
        """Drop the cached views (their buffers are about to go)."""
        self._views.clear()


def pageable_leaves(block: nn.Module, shared: set[int]) -> list[Leaf]:
    """Leaves of the block's weights that can be paged.

    A weight is paged when it is a matrix or larger (or a frozen wrapper subclass), dense in memory,
    alone in its storage and used by this block only. Norms, biases and adapters stay on the device:
    trained matrices are taken for adapters when they hold less than a quarter of the values of the
    block's matrices.

    Args:
        block: one block of the stack.
        shared: `id`s of parameters that must stay where they are, as other modules outside this
            block use them too, say.
    """
    weights = {
        id(parameter): (name, parameter)
        for name, parameter in block.named_parameters()
        if is_wrapper(parameter) or parameter.dim() >= 2
    }
    trained = _paged_trained([parameter for _, parameter in weights.values()])
    leaves: list[Leaf] = []
    for name, parameter in weights.values():
        if id(parameter) in shared or (parameter.requires_grad and id(parameter) not in trained):
            continue
        found = list(tensor_leaves(name, parameter))
        if all(_movable(leaf) for leaf in found):
            leaves.extend(replace(leaf, trained=parameter.requires_grad) for leaf in found)
    return leaves


def _paged_trained(weights: Sequence[torch.Tensor]) -> set[int]:
    """`id`s of the trained ones among a block's matrices that are no adapters."""
    trained = [weight for weight in weights if weight.requires_grad and not is_wrapper(weight)]
    total = sum(weight.numel() for weight in weights)
    if sum(weight.numel() for weight in trained) < TRAINED_SHARE * total:
        return set()
    largest = max((weight.numel() for weight in weights), default=0)
    return {id(weight) for weight in trained if weight.numel() >= LEAST_SHARE * largest}


def leaves_bytes(leaves: Sequence[Leaf]) -> int:
    """Bytes of an image of `leaves`, alignment included."""
    return lay_out(leaves)[1]


def build_image(index: int, leaves: Sequence[Leaf], arena: PinnedArena) -> BlockImage:
    """Copy `leaves` into one new host buffer and bind them to it; their old memory is freed."""
    placements, size_bytes = lay_out(leaves)
    buffer_h = arena.empty((size_bytes,), torch.uint8, tag="weights")
    return filled_image(index, placements, MemorySource(buffer_h))


def filled_image(index: int, placements: Sequence[Placement], source: Source) -> BlockImage:
    """Copy the leaves into the source's buffer and bind them to it; their old memory is freed."""
    for placement in placements:
        placement.view(source.buffer_h).copy_(_values(placement.leaf))
    image = image_over(index, placements, source)
    image.bind_first()
    image.homes = tuple(
        TrainedHome(image, position, placement.leaf.holder)
        for position, placement in enumerate(placements)
        if placement.leaf.trained
    )
    return image


def image_over(index: int, placements: Sequence[Placement], source: Source) -> BlockImage:
    """An image of bytes that are in the source already; nothing is bound to it yet."""
    return BlockImage(
        index,
        source,
        tuple(placements),
        has_plain=any(placement.leaf.attribute is None for placement in placements),
        _replaced=[0] * len(placements),
    )


def bytes_of(placements: Sequence[Placement], size_bytes: int) -> Iterator[torch.Tensor]:
    """The bytes of an image in order, leaf by leaf, as uint8 CPU tensors made one at a time."""
    ends = [placement.offset for placement in placements[1:]] + [size_bytes]
    for placement, end in zip(placements, ends, strict=True):
        piece = torch.zeros(end - placement.offset, dtype=torch.uint8)
        replace(placement, offset=0).view(piece).copy_(_values(placement.leaf))
        yield piece


def lay_out(leaves: Sequence[Leaf]) -> tuple[list[Placement], int]:
    """Where each leaf lies in an image of them all, and the image's bytes."""
    placements = []
    offset = 0
    for leaf in leaves:
        tensor = leaf.get()
        stride = tensor.stride()
        if leaf.trained:  # so that the optimizer finds its values in one run
            stride = torch.empty(tensor.shape, device="meta").stride()
        placements.append(Placement(leaf, offset, tensor.dtype, tuple(tensor.shape), tuple(stride)))
        size_bytes = tensor.numel() * tensor.element_size()
        offset += -(-size_bytes // ALIGNMENT) * ALIGNMENT
    return placements, offset


def _values(leaf: Leaf) -> torch.Tensor:
    """Those of a leaf; of a parameter that has none yet, loaded for the caller alone."""
    return values_of(leaf.owner) if can_load(leaf.owner) else leaf.get()


def _movable(leaf: Leaf) -> bool:
    """Dense, strided, with storage of its own: no broadcast view, no slice of something else."""
    tensor = leaf.get()
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    if tensor.is_meta and not can_load(leaf.owner):
        return False
    size_bytes = tensor.numel() * tensor.element_size()
    if tensor.untyped_storage().nbytes() < size_bytes:
        return False
    return is_dense(tensor)


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
