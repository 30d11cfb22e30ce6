"""The experts of one layer as rows in host memory, and the compact stack that a call computes with.

A mixture-of-experts layer keeps its experts stacked: parameters whose first dimension counts the
experts. In host memory each expert's part of a parameter is one row; on the device a call sees only
the rows it picked, side by side, as a stack of that many experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ts_core.errors import NotAvailableError
from ts_core.memory.arena import PinnedArena
from ts_core.store.images import ALIGNMENT, Placement, build_image
from ts_core.store.leaves import Leaf, is_wrapper, stored_bytes, tensor_leaves


@dataclass(frozen=True)
class StackAdapter:
    """What an adapter adds to a stack: scale * left[e] @ right[e] to each expert e.

    Attributes:
        left: [experts, rows, rank], of the stack's dtype, differentiable.
        right: [experts, rank, columns], likewise.
        scale: a number.
    """

    left: Tensor
    right: Tensor
    scale: float


Forward = Callable[..., Any]


def _none() -> dict[str, list[StackAdapter]]:
    return {}


@dataclass(frozen=True)
class StackedExperts:
    """One module whose parameters stack experts, as a model-family plug-in describes it.

    Attributes:
        name: its name in the model.
        module: the module; its forward takes the indices of the picked experts.
        parameters: names of its parameters whose first dimension counts the experts.
        index_position: place of the indices among the arguments of forward.
        index_name: their name.
        count_attribute: attribute of the module that holds the number of experts, which its
            forward reads.
        one_by_one: tells whether its forward, as the model is set now, reads one expert at a time
            (`weight[i]`), so that stored weights can be decoded one at a time.
        refused: why this package cannot run it with its adapters, or "".
        adapters: what active adapters add to its parameters now, by name.
        around: modules around it that would add that themselves, to every expert of the whole
            stack, and the forwards that they have instead while this package adds it.
    """

    name: str
    module: nn.Module
    parameters: tuple[str, ...]
    index_position: int = 1
    index_name: str = "top_k_index"
    count_attribute: str = "num_experts"
    one_by_one: Callable[[], bool] = bool
    refused: str = ""
    adapters: Callable[[], dict[str, list[StackAdapter]]] = _none
    around: tuple[tuple[nn.Module, Forward], ...] = ()

    @property
    def count(self) -> int:
        """Number of experts."""
        return int(getattr(self.module, self.count_attribute))

    def pageable(self) -> list[str]:
        """Names of the frozen parameters that hold a matrix (or more) per expert."""
        found = []
        for name in self.parameters:
            parameter = self.module._parameters[name]
            assert parameter is not None
            if not parameter.requires_grad and parameter.dim() >= 3:
                found.append(name)
        return found


@dataclass(frozen=True)
class Part:
    """One plain tensor of a stack: where it lies on the host, and how it goes by expert.

    Attributes:
        placement: in the layer's host image.
        by_expert: whether its bytes split evenly by expert; else it is common to all.
        size_bytes: of one expert's row, or of the whole when common.
    """

    placement: Placement
    by_expert: bool
    size_bytes: int

    def bytes_of(self, count: int) -> int:
        """Bytes for `count` experts."""
        return self.size_bytes * count if self.by_expert else self.size_bytes


@dataclass(frozen=True)
class Stack:
    """One stacked parameter."""

    name: str
    parameter: nn.Parameter
    parts: tuple[Part, ...]

    @property
    def stored(self) -> bool:
        """Whether the weights are in a codec's format (decoded before use)."""
        return is_wrapper(self.parameter)

    def compact(self, views: Sequence[Tensor], count: int) -> Tensor:
        """The stack of `count` experts over device memory.

        Args:
            views: uint8, one per part.
            count: experts in it.
        """
        if not self.stored:
            (part,), (view,) = self.parts, views
            shape = (count, *part.placement.shape[1:])
            return view.view(part.placement.dtype).view(shape)
        stored: Any = self.parameter
        buffers = {
            str(part.placement.leaf.attribute): view.view(part.placement.dtype)
            for part, view in zip(self.parts, views, strict=True)
        }
        made: Tensor = stored.stack_like(buffers, count)
        return made


class ExpertLayer:
    """The paged experts of one layer.

    Args:
        index: its place among the layers with paged experts.
        spec: what the model family says of it.
        arena: host memory for the rows; the parameters become views of it.

    Raises:
        NotAvailableError: a weight whose stored form cannot be split by expert.
    """

    def __init__(self, index: int, spec: StackedExperts, arena: PinnedArena) -> None:
        self.index = index
        self.spec = spec
        self.count = spec.count
        self.last_picks: tuple[int, ...] | None = None
        self.offsets: dict[int, tuple[list[int], int]] = {}
        names = spec.pageable()
        leaves: list[Leaf] = []
        splits: list[tuple[str, nn.Parameter, list[tuple[Leaf, bool]]]] = []
        for name in names:
            parameter = spec.module._parameters[name]
            assert parameter is not None
            found = split_leaves(f"{spec.name}.{name}", parameter)
            splits.append((name, parameter, found))
            leaves += [leaf for leaf, _ in found]
        for leaf in leaves:
            if not leaf.get().is_contiguous():
                leaf.set(leaf.get().contiguous())
        self.image = build_image(index, leaves, arena)
        placements = {id(p.leaf): p for p in self.image.placements}
        self.stacks = tuple(
            Stack(
                name, parameter, tuple(self._part(placements[id(leaf)], by) for leaf, by in found)
            )
            for name, parameter, found in splits
        )
        self.parts = tuple(part for stack in self.stacks for part in stack.parts)
        self.small = tuple(name for name in spec.parameters if name not in names)

    def _part(self, placement: Placement, by_expert: bool) -> Part:
        size = placement.leaf.get().numel() * placement.leaf.get().element_size()
        return Part(placement, by_expert, size // self.count if by_expert else size)

    @property
    def size_bytes(self) -> int:
        """Bytes of all experts on the device."""
        return self.layout(self.count)[1]

    def layout(self, count: int) -> tuple[list[int], int]:
        """Where each part of `count` experts begins in a slot, and the bytes of all."""
        cached = self.offsets.get(count)
        if cached is None:
            offsets, end = [], 0
            for part in self.parts:
                offsets.append(end)
                end += -(-part.bytes_of(count) // ALIGNMENT) * ALIGNMENT
            cached = self.offsets[count] = (offsets, end)
        return cached

    def compact(self, buffer: Tensor, count: int) -> list[Tensor]:
        """Per stack, the compact stack of `count` experts in `buffer` (uint8)."""
        offsets, _ = self.layout(count)
        views = iter(
            [
                buffer[start : start + part.bytes_of(count)]
                for start, part in zip(offsets, self.parts, strict=True)
            ]
        )
        return [stack.compact([next(views) for _ in stack.parts], count) for stack in self.stacks]


def split_leaves(name: str, parameter: Tensor) -> list[tuple[Leaf, bool]]:
    """The leaves of a stacked parameter, and whether each goes by expert.

    A stored weight says so itself: `stack_rows()` names the inner tensors that split evenly along
    the first dimension, the others being common, or is None; `stack_like(buffers, count)` makes a
    stack of fewer of them.

    Raises:
        NotAvailableError: its stored form cannot be split.
    """
    leaves = list(tensor_leaves(name, parameter))
    if not is_wrapper(parameter):
        return [(leaf, True) for leaf in leaves]
    stored: Any = parameter
    rows = stored.stack_rows() if hasattr(stored, "stack_rows") else None
    if rows is None:
        raise NotAvailableError(
            f"{name} is stored in a form ({type(parameter).__name__}) that cannot be split by "
            f"expert, so moe_paging cannot copy single experts. Store it with a block size that "
            f"divides the values of one expert and without one-byte scales, or use "
            f"moe_paging=False."
        )
    return [(leaf, leaf.attribute in rows) for leaf in leaves]


def expert_bytes(spec: StackedExperts, per_weight: float | None = None) -> int:
    """Bytes of this module's pageable experts.

    Args:
        spec: the module.
        per_weight: bytes per weight that plain ones will be stored in, or None: as they are.
    """
    total = 0
    for name in spec.pageable():
        parameter = spec.module._parameters[name]
        assert parameter is not None
        if per_weight is not None and not is_wrapper(parameter):
            total += int(parameter.numel() * per_weight)
        else:
            total += stored_bytes(parameter)
    return total


def runs(picks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Consecutive picks as (place among the picks, first expert, how many)."""
    found: list[tuple[int, int, int]] = []
    for place, expert in enumerate(picks):
        if found and found[-1][1] + found[-1][2] == expert:
            start, first, length = found[-1]
            found[-1] = (start, first, length + 1)
        else:
            found.append((place, expert, 1))
    return found


def picked_table(index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Which experts `index` names, and where each is among those.

    Args:
        index: integers from 0 to `count`, where `count` stands for no expert.
        count: number of experts.

    Returns:
        hit uint8 [count + 1], and place int64 [count + 1] (rank among the hit experts; meaningless
        where not hit), both on the device of `index`; no wait for it.
    """
    hit = torch.zeros(count + 1, dtype=torch.uint8, device=index.device)
    hit.index_fill_(0, index.reshape(-1).long(), 1)
    return hit, hit.cumsum(0, dtype=torch.int64) - 1
