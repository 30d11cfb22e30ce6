"""Measuring what autograd holds for each block, in one forward of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ts_core.engine.activation_pages import PageStore
from ts_core.engine.saved_tensors import PLAIN_TYPES
from ts_core.schedule.activation_policy import BlockActivations
from ts_core.store.leaves import is_wrapper

_SIMPLE = (
    torch.Tensor,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
)


Range = tuple[int, int, int]  # storage, first byte, bytes


class ActivationMeter:
    """Counts the storages that autograd saves, each once, where it is saved first.

    Args:
        count: blocks of the stack.
        store: tells what can be paged.

    Attributes:
        finished: blocks that were called.
        broken: whether one of them raised.
    """

    def __init__(self, count: int, store: PageStore) -> None:
        self.finished: set[int] = set()
        self.broken = False
        self._store = store
        self._saved = [0] * count
        self._boundary = [0] * count
        # A weak reference keeps a storage's identity from being used again in this pass.
        self._seen: dict[int, StorageWeakRef] = {}
        self._inputs: dict[int, StorageWeakRef] = {}
        self._ranges: dict[Range, set[int]] = {}
        self._pages: list[dict[Range, None]] = [{} for _ in range(count)]
        self._pageable = [0] * count
        self._weights: set[int] = set()

    def begin(self, weights: Iterable[torch.Tensor]) -> None:
        """A forward begins; `weights` are no activations (their memory may have moved since)."""
        self._weights = {
            weight.untyped_storage()._cdata for weight in weights if type(weight) in PLAIN_TYPES
        }

    def observer(self, index: int) -> Callable[[torch.Tensor], None]:
        """What a block's saved-tensor hook calls with every tensor."""

        def observe(tensor: torch.Tensor) -> None:
            self._count(index, tensor)

        return observe

    def enter(self, index: int, args: Any, kwargs: Any) -> None:
        """A block is called with these arguments."""
        for tensor in tensors_in((args, kwargs)):
            if not self._counts(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._inputs:
                self._inputs[storage._cdata] = StorageWeakRef(storage)
                self._boundary[index] += storage.nbytes()

    def result(self) -> list[BlockActivations]:
        """What was measured, in the order of the stack."""
        return [
            BlockActivations(saved, min(pageable, saved), min(boundary, saved))
            for saved, pageable, boundary in zip(
                self._saved, self._pageable, self._boundary, strict=True
            )
        ]

    def pages(self) -> list[list[tuple[Range, int]]]:
        """Per block, what it would page by itself in the order of saving: range and bytes."""
        return [[(key, key[2]) for key in found] for found in self._pages]

    def _counts(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.device == self._store.device
            and tensor.layout is torch.strided
            and not isinstance(tensor._base, nn.Parameter)
            and tensor.untyped_storage()._cdata not in self._weights
        )

    def _count(self, index: int, tensor: torch.Tensor) -> None:
        if not self._counts(tensor):
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = StorageWeakRef(storage)
            self._saved[index] += storage.nbytes()
        covered = self._store.ranges.of(tensor)
        if covered is None:
            return
        key = (storage._cdata, *covered)
        self._pages[index].setdefault(key)
        # What a block saves of its output is a page of the next one too, if that alone is paged.
        # What more blocks share (a mask, say) is one page.
        blocks = self._ranges.setdefault(key, set())
        if not blocks or (index not in blocks and index == min(blocks) + 1):
            blocks.add(index)
            self._pageable[index] += covered[1]


def plain_tensors(blocks: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Parameters and buffers of blocks, which are no activations, except wrapper subclasses."""
    return [
        tensor
        for block in blocks
        for tensor in (*block.parameters(), *block.buffers())
        if not is_wrapper(tensor)
    ]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def stateful_argument(value: Any) -> str | None:
    """The type of an argument that a second forward would change (a key/value cache), if any.

    Known by a method whose name begins with "update"; plain dicts and lists are taken as data.
    """
    if isinstance(value, _SIMPLE):
        return None
    if type(value) in (tuple, list):
        return _first(value)
    if type(value) is dict:
        return _first(list(value.values()))
    if any(name.startswith("update") for name in dir(type(value))):
        return type(value).__name__
    return None


def _first(values: Sequence[Any]) -> str | None:
    for value in values:
        found = stateful_argument(value)
        if found is not None:
            return found
    return None
