"""The state of one streamed block: which tensors it has, where they lie, and whether they changed.

Every parameter and buffer of a block lies in one host buffer (its image) and is an ordinary CPU
tensor outside the block's own computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ts_core.errors import DataError, OutOfBudgetError, StateError
from ts_core.memory.arena import PinnedArena
from ts_core.store import BlockImage, Leaf, build_image, tensor_leaves
from ts_core.store.leaves import is_dense, is_wrapper


class BlockState:
    """The parameters and buffers of one block, laid out in an image.

    Args:
        index: the block's position in the list.
        block: any module; its state moves into the image (parameter objects stay the same).
        dtype: floating point state is converted to it; None leaves it as it is.
        arena: where the image is carved from.
        pinned: whether the device copies from page-locked memory only.

    Raises:
        OutOfBudgetError: the image cannot be page-locked although the device needs it.
    """

    def __init__(
        self,
        index: int,
        block: nn.Module,
        dtype: torch.dtype | None,
        arena: PinnedArena,
        pinned: bool,
    ) -> None:
        self.index = index
        self.block = block
        self._entries = list(registered(block))
        leaves = _leaves(block)
        for leaf in leaves:
            _settle(leaf, dtype)
        fallbacks = arena.stats()["arena_fallbacks"]
        self.image: BlockImage = build_image(index, leaves, arena)
        if pinned and leaves and arena.stats()["arena_fallbacks"] > fallbacks:
            raise OutOfBudgetError(
                f"block {index} needs {self.image.size_bytes} bytes of page-locked host memory and "
                f"got none: {arena.refusal}. Raise the limit (`trainstream doctor` says how), or "
                f"use fewer or smaller blocks."
            )
        self._home = [
            (place, place.view(self.image.buffer_h), place.leaf.get().data_ptr())
            for place in self.image.placements
        ]

    @property
    def size_bytes(self) -> int:
        """Bytes of one copy of the block to the device."""
        return self.image.size_bytes

    def trained(self) -> list[nn.Parameter]:
        """Its parameters that require a gradient now."""
        return [p for p in self.block.parameters() if p.requires_grad]

    def versions(self) -> list[int]:
        """In-place counters of every parameter and buffer."""
        return [tensor._version for _, _, _, tensor in self._entries]

    @torch.no_grad()
    def take_writes(self) -> None:
        """Before a pass: bring state that was given other memory (`p.data = ..`) into the image.

        Raises:
            StateError: a parameter or buffer was replaced by another object, or is of another
                shape or dtype now.
        """
        found = list(registered(self.block))
        if [(name, id(tensor)) for name, _, _, tensor in found] != [
            (name, id(tensor)) for name, _, _, tensor in self._entries
        ]:
            known = {id(tensor) for _, _, _, tensor in self._entries}
            name = next((name for name, _, _, t in found if id(t) not in known), "one that is gone")
            raise StateError(
                f"block {self.index}: parameters or buffers were added, removed or replaced after "
                f"StreamedModel was made ({name}). Copy into the ones there are "
                f"(parameter.copy_(..) under torch.no_grad(), load_state_dict without assign), or "
                f"make a new StreamedModel."
            )
        for place, home, pointer in self._home:
            now = place.leaf.get()
            if now.data_ptr() == pointer:
                continue
            if tuple(now.shape) != place.shape or now.dtype != place.dtype:
                raise StateError(
                    f"block {self.index}: {place.leaf.name} is a {now.dtype} tensor of shape "
                    f"{tuple(now.shape)} now, while it streams as {place.dtype} {place.shape}. Put "
                    f"it back, or make a new StreamedModel."
                )
            home.copy_(now)
            place.leaf.set(home)

    def check_unchanged(self, before: Sequence[int]) -> None:
        """After the block computed: its own code must not have written to its state.

        Raises:
            StateError: it did; what it wrote is lost, and replaced buffers are put back.
        """
        for (name, registry, key, tensor), version in zip(self._entries, before, strict=True):
            if registry.get(key) is tensor and tensor._version == version:
                continue
            registry[key] = tensor
            raise StateError(
                f"block {self.index} changed its own {name} while it ran. State streams one way, "
                f"so the change would be lost. Put layers that keep running statistics (BatchNorm) "
                f"in eval mode, or keep such state outside the block and pass it as an argument."
            )


def registered(block: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Name, registry, key and tensor of every parameter and buffer, repeated uses included."""
    for path, module in block.named_modules():
        prefix = f"{path}." if path else ""
        for registry in (module._parameters, module._buffers):
            for key, tensor in registry.items():
                if tensor is not None:
                    yield prefix + key, registry, key, tensor


def check_blocks(blocks: Sequence[nn.Module]) -> None:
    """Refuse blocks that cannot stream.

    Raises:
        DataError: no blocks, not modules, or state that is on meta, sparse, trained in a wrapper
            format, used by two blocks, or sharing memory with other state.
    """
    if not blocks:
        raise DataError("StreamedModel needs at least one block, and got an empty list.")
    spans: set[tuple[int, int, int, str, int]] = set()
    for index, block in enumerate(blocks):
        if not isinstance(block, nn.Module):
            raise DataError(
                f"block {index} is a {type(block).__name__}. Every block must be a torch.nn.Module."
            )
        for name, _, _, tensor in registered(block):
            _check_tensor(index, name, tensor)
            for leaf in tensor_leaves(name, tensor):
                inner = leaf.get()
                if inner.numel() > 0:
                    start, end = _extent(inner)
                    spans.add((start, end, index, name, id(tensor)))
    _check_overlaps(sorted(spans))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of the tensor's memory and the one after its last."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _check_overlaps(spans: list[tuple[int, int, int, str, int]]) -> None:
    reached, owner = 0, (0, "", 0)
    for start, end, index, name, key in spans:
        if start < reached and (owner[0], owner[2]) != (index, key):
            raise DataError(
                f"{name} of block {index} and {owner[1]} of block {owner[0]} share memory. Each "
                f"parameter and buffer streams with one block: give one of them memory of its own "
                f"(tensor.clone()), or put modules that share a parameter into one block."
            )
        if end > reached:
            reached, owner = end, (index, name, key)


def _check_tensor(index: int, name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise DataError(
            f"{name} of block {index} is on the meta device, so has no values to stream. Load it "
            f"first (module.to_empty(device='cpu'), then load_state_dict)."
        )
    if tensor.layout is not torch.strided:
        raise DataError(
            f"{name} of block {index} has layout {tensor.layout}. Only dense state streams: use "
            f".to_dense()."
        )
    if is_wrapper(tensor) and tensor.requires_grad:
        raise DataError(
            f"{name} of block {index} is a trained {type(tensor).__name__}. Weights in such a "
            f"format stream frozen: requires_grad_(False), and train adapters instead."
        )


def _leaves(block: nn.Module) -> list[Leaf]:
    leaves: list[Leaf] = []
    seen: set[int] = set()
    for name, _, _, tensor in registered(block):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            leaves.extend(tensor_leaves(name, tensor))
    return leaves


def _settle(leaf: Leaf, dtype: torch.dtype | None) -> None:
    """Give a leaf its dtype, dense memory, and a gradient that matches."""
    now = leaf.get()
    convert = dtype is not None and leaf.attribute is None and now.is_floating_point()
    wanted = now.to(dtype) if convert else now
    if not is_dense(wanted):
        wanted = wanted.contiguous()
    owner = leaf.owner
    gradient, owner.grad = (owner.grad, None) if owner.is_leaf else (None, None)
    if wanted is not now:
        leaf.set(wanted)
    if gradient is not None:
        # Its memory moves to the host with the image: the gradient is given back after that.
        leaf.set(wanted.to("cpu"))
        owner.grad = gradient.to(device="cpu", dtype=wanted.dtype)
