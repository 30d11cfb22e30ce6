"""A block's frozen weights laid back to back in one host buffer, copied as one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ts_core.errors import StateError
from ts_core.memory.arena import PinnedArena
from ts_core.store.leaves import Leaf, is_wrapper, tensor_leaves
from ts_core.store.sources import MemorySource, Source

ALIGNMENT = 256
HOST_KEY = -1


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
    """

    index: int
    source: Source
    placements: tuple[Placement, ...]
    has_plain: bool
    _views: dict[int, tuple[list[torch.Tensor], list[int]]] = field(default_factory=dict)
    _pointers: list[int] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)

    @property
    def buffer_h(self) -> torch.Tensor:
        """uint8 [size_bytes] in host address space; what a frozen weight's value is."""
        return self.source.buffer_h

    @property
    def size_bytes(self) -> int:
        """Bytes of one copy of the block."""
        return self.buffer_h.numel()

    def bind(self, key: int, buffer: torch.Tensor) -> None:
        """Let every leaf read from `buffer`; views are made once per `key`."""
        cached = self._views.get(key)
        if cached is None:
            views = [placement.view(buffer) for placement in self.placements]
            cached = (views, [view.data_ptr() for view in views])
            self._views[key] = cached
        for placement, view in zip(self.placements, cached[0], strict=True):
            placement.leaf.set(view)
        self._pointers = cached[1]
        self._versions = [placement.leaf.owner._version for placement in self.placements]

    def bind_host(self) -> None:
        """Let every leaf read from the host image."""
        self.bind(HOST_KEY, self.buffer_h)

    def take_writes(self) -> bool:
        """Bring what the user wrote into a weight since it was bound into the host image.

        Noticed are in-place operations (their version counter) and replaced tensors
        (`p.data = other`). Returns whether there were any: copies on the device are stale then.

        Raises:
            StateError: a weight was unfrozen, or replaced by one of another shape or dtype.
        """
        found = False
        for placement, pointer, version in zip(
            self.placements, self._pointers, self._versions, strict=True
        ):
            leaf = placement.leaf
            if leaf.owner.requires_grad:
                raise StateError(
                    f"{leaf.name} of block {self.index} was frozen when the model was wrapped, and "
                    f"streams; it requires a gradient now. unwrap() the model, unfreeze, and wrap "
                    f"it again."
                )
            now = leaf.get()
            if now.data_ptr() == pointer and leaf.owner._version == version:
                continue
            if tuple(now.shape) != placement.shape or now.dtype != placement.dtype:
                raise StateError(
                    f"{leaf.name} of block {self.index} was replaced by a {now.dtype} tensor of "
                    f"shape {tuple(now.shape)}, while it streams as {placement.dtype} "
                    f"{placement.shape}. unwrap() the model before changing it, then wrap it again."
                )
            target = placement.view(self.buffer_h)
            if target.data_ptr() != now.data_ptr():
                target.copy_(now)
            found = True
        return found

    def forget_views(self) -> None:
        """Drop the cached views (their buffers are about to go)."""
        self._views.clear()


def pageable_leaves(block: nn.Module, shared: set[int]) -> list[Leaf]:
    """Leaves of the block's weights that can be paged.

    A weight is paged when it is frozen, a matrix or larger (or a wrapper subclass), dense in
    memory, alone in its storage and used by this block only. Norms, biases and adapters stay on
    the device.

    Args:
        block: one block of the stack.
        shared: `id`s of parameters that other modules outside this block use too.
    """
    leaves: list[Leaf] = []
    seen: set[int] = set()
    for name, parameter in block.named_parameters():
        if parameter.requires_grad or id(parameter) in shared or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        wrapper = is_wrapper(parameter)
        if not wrapper and parameter.dim() < 2:
            continue
        found = list(tensor_leaves(name, parameter))
        if all(_movable(leaf.get()) for leaf in found):
            leaves.extend(found)
    return leaves


def leaves_bytes(leaves: Sequence[Leaf]) -> int:
    """Bytes of an image of `leaves`, alignment included."""
    return _layout(leaves)[1]


def build_image(index: int, leaves: Sequence[Leaf], arena: PinnedArena) -> BlockImage:
    """Copy `leaves` into one new host buffer and bind them to it; their old memory is freed."""
    placements, size_bytes = _layout(leaves)
    buffer_h = arena.empty((size_bytes,), torch.uint8, tag="weights")
    for placement in placements:
        placement.view(buffer_h).copy_(placement.leaf.get())
    image = BlockImage(
        index,
        MemorySource(buffer_h),
        tuple(placements),
        has_plain=any(placement.leaf.attribute is None for placement in placements),
    )
    image.bind_host()
    return image


def _layout(leaves: Sequence[Leaf]) -> tuple[list[Placement], int]:
    placements = []
    offset = 0
    for leaf in leaves:
        tensor = leaf.get()
        placements.append(
            Placement(leaf, offset, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        )
        size_bytes = tensor.numel() * tensor.element_size()
        offset += -(-size_bytes // ALIGNMENT) * ALIGNMENT
    return placements, offset


def _movable(tensor: torch.Tensor) -> bool:
    """Dense, strided, with storage of its own: no broadcast view, no slice of something else."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() == 0:
        return False
    size_bytes = tensor.numel() * tensor.element_size()
    if tensor.untyped_storage().nbytes() < size_bytes:
        return False
    dense = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, size in dense:
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
