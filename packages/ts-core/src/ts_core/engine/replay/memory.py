"""Memory at fixed addresses: what a recording reads and writes, and what it saves for backward.

`Scratch` is used by one replay at a time (arguments, results, gradients): every value in it is
copied in right before a replay, or out right after, so all recordings share it. `SavedMemory`
lives from a block's forward to its backward and belongs to one recording.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ts_core.engine.replay.signature import NotReplayable, extent, is_plain, overlaps, own_memory
from ts_core.engine.replay.watch import Weights
from ts_core.store.leaves import is_wrapper
from ts_core.store.pager import ParamPager
from ts_core.store.saved_views import SavedView

_ALIGNMENT = 256
_SEEDS = (torch.int64, torch.uint64)
_MOST_SEEDS = 64


class Scratch:
    """Tensors by role and layout, made once and shared while some recording holds them.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: weakref.WeakValueDictionary[Any, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )

    def get(
        self, role: str, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """The tensor of that role and layout (strides without overlaps, or 0 where repeated)."""
        key = (role, tuple(shape), tuple(stride), dtype)
        found = self._tensors.get(key)
        if found is None:
            flat = torch.empty(extent(shape, stride), dtype=dtype, device=self._device)
            found = flat.as_strided(tuple(shape), tuple(stride))
            self._tensors[key] = found
        return found

    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.untyped_storage().nbytes() for tensor in list(self._tensors.values()))


class SavedMemory:
    """Saved-tensor hooks that copy what autograd saves into memory at fixed addresses.

    The first pass notes what is saved; `allocate` then makes room, and every later pass must save
    the same. Not copied are weights (they are where they are, or a handle finds them in their
    slot), the recording's arguments (copied in again before backward) and constants.

    Args:
        weights: of the block.
        inputs: the recording's arguments.
        outside: constants that the block reads.
        pager: of plain weights that stream, if any.
        device: of the block.
    """

    def __init__(
        self,
        weights: Weights,
        inputs: Sequence[torch.Tensor],
        outside: Sequence[torch.Tensor],
        pager: ParamPager | None,
        device: torch.device,
        random: bool,
    ) -> None:
        self.owners: dict[int, torch.Tensor] = {}
        self.used_inputs: set[int] = set()
        self.size_bytes = 0
        self._weights = weights
        self._params = {id(param) for param in weights.params}
        self._inputs = {tensor.untyped_storage()._cdata: k for k, tensor in enumerate(inputs)}
        self._outside = {tensor.untyped_storage()._cdata for tensor in outside}
        self._pager = pager
        self._device = device
        self._random = random
        self._ranges: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
        self._entries: list[tuple[int, torch.dtype]] = []
        self._offsets: list[int] = []
        self._buffer: torch.Tensor | None = None
        self._next = 0
        self._final = False
        self._seeds: torch.Tensor | None = None
        self._next_seed = 0
        self._seen: dict[Any, tuple[int, StorageWeakRef]] = {}
        for param in weights.params:
            if is_wrapper(param):
                self.owners[id(param)] = param  # its own function may keep it unseen

    def allocate(self) -> None:
        """Make memory for what the first pass saved."""
        self._buffer = torch.empty(self.size_bytes, dtype=torch.uint8, device=self._device)
        self._seeds = torch.empty(_MOST_SEEDS, dtype=torch.int64, device=self._device)

    def begin(self, final: bool = False) -> None:
        """A pass begins; the `final` one is recorded."""
        self._final = final
        self._next = self._next_seed = 0
        self._seen.clear()
        self._ranges = {}
        for leaf in self._weights.leaves:
            tensor = leaf.get()
            start = tensor.data_ptr()
            end = start + extent(tensor.shape, tensor.stride()) * tensor.element_size()
            key = tensor.untyped_storage()._cdata
            self._ranges.setdefault(key, []).append((start, end, leaf.owner))

    def end(self) -> None:
        """A pass has ended.

        Raises:
            NotReplayable: it saved less than the first one.
        """
        self._seen.clear()
        if self._next != len(self._entries):
            raise NotReplayable("it saves other tensors for backward each time")

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps in place of `tensor`."""
        if not is_plain(tensor):
            if id(tensor) in self._params:
                return tensor
            raise NotReplayable(f"autograd saves a {type(tensor).__name__} that is no parameter")
        if self._pager is not None:
            view = self._pager.saved_view(tensor)
            if view is not None:
                if view.leaf is not None:
                    self.owners[id(view.leaf.owner)] = view.leaf.owner
                return view
        key = tensor.untyped_storage()._cdata
        if key in self._ranges:
            address = tensor.data_ptr()
            for start, end, owner in self._ranges[key]:
                if start <= address < end:
                    self.owners[id(owner)] = owner
            return tensor.detach()
        if key in self._inputs:
            self.used_inputs.add(self._inputs[key])
            return tensor.detach()
        if key in self._outside:
            return tensor.detach()
        if tensor.device != self._device:
            if self._random and self._final:  # a seed of dropout, another one in each call
                raise NotReplayable("autograd saves a tensor of the host in a block with dropout")
            return tensor.detach()
        if tensor.dim() == 0 and tensor.dtype in _SEEDS:
            return self._copy_seed(tensor)
        return self._copy(tensor, key)

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor again."""
        tensor: torch.Tensor = packed.tensor() if isinstance(packed, SavedView) else packed
        return tensor

    def _copy(self, tensor: torch.Tensor, storage: int) -> torch.Tensor:
        if overlaps(tensor.shape, tensor.stride()):
            raise NotReplayable("autograd saves a tensor whose elements share memory")
        length = extent(tensor.shape, tensor.stride())
        entry = (length, tensor.dtype)
        dense = own_memory(tensor).numel() == length
        shape = None if dense else (tensor.shape, tensor.stride())
        where = (storage, tensor.storage_offset(), entry, shape, tensor._version)
        seen = self._seen.get(where)
        if seen is not None:
            number = seen[0]
        else:
            number = self._next
            self._next += 1
            self._seen[where] = (number, StorageWeakRef(tensor.untyped_storage()))
            if self._buffer is None:
                self._plan(entry)
        if self._buffer is None:
            return tensor.detach()
        if number >= len(self._entries) or self._entries[number] != entry:
            raise NotReplayable("it saves other tensors for backward each time")
        start = self._offsets[number]
        flat = self._buffer[start : start + length * tensor.element_size()].view(tensor.dtype)
        kept = flat.as_strided(tensor.shape, tensor.stride())
        if seen is None:
            own_memory(kept).copy_(own_memory(tensor.detach()))
        return kept

    def _copy_seed(self, tensor: torch.Tensor) -> Any:
        """Attention saves the state of random numbers on the host, but on the device in a capture
        (with and without dropout): such values count as no part of what is saved each time."""
        if self._seeds is None:
            return tensor.detach()
        if self._next_seed == _MOST_SEEDS:
            raise NotReplayable(f"it saves more than {_MOST_SEEDS} integers for backward")
        kept = self._seeds[self._next_seed].view(tensor.dtype)
        self._next_seed += 1
        kept.copy_(tensor.detach())
        return kept

    def _plan(self, entry: tuple[int, torch.dtype]) -> None:
        length, dtype = entry
        self._entries.append(entry)
        self._offsets.append(self.size_bytes)
        size = length * torch.empty(0, dtype=dtype).element_size()
        self.size_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT


def fresh(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in memory of their own, with the same strides."""
    found = [
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        for tensor in tensors
    ]
    copy_all(found, tensors)
    return found


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target; one launch for all of a dtype."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
        return
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]]
    groups = {}
    for target, source in zip(targets, sources, strict=True):
        into, of = groups.setdefault((target.dtype, source.dtype), ([], []))
        into.append(target)
        of.append(source)
    for into, of in groups.values():
        torch._foreach_copy_(into, of)
