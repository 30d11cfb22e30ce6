"""Which part of its storage a saved tensor covers, and whether that may leave the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ts_core.engine.saved_tensors import PLAIN_TYPES
from ts_core.store.leaves import is_dense

# A tensor with gaps is paged with its whole storage, if that is at most this many times larger.
_STORAGE_SHARE = 4


class SavedRanges:
    """Ranges of bytes to page.

    Args:
        device: where the tensors are.
        min_bytes: smaller tensors stay.
    """

    def __init__(self, device: torch.device, min_bytes: int) -> None:
        self.device = device
        self.min_bytes = min_bytes
        self._weights: set[int] = set()
        self._empty: dict[torch.dtype, torch.Tensor] = {}

    def set_weights(self, weights: Iterable[torch.Tensor]) -> None:
        """Storages of `weights` stay.

        Parameters whose class is another now (an update is in flight) are known by their class.
        """
        self._weights = {
            tensor.untyped_storage()._cdata for tensor in weights if type(tensor) in PLAIN_TYPES
        }

    def of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """First byte and size of the part of its storage to page; None for a tensor that stays.

        Tensors that stay are on another device, small, sparse, parameters, views of parameters,
        broadcast (stride 0), or a small part of their storage.
        """
        size = tensor.numel() * tensor.element_size()
        if (
            size < self.min_bytes
            or size == 0
            or tensor.device != self.device
            or isinstance(tensor, torch.nn.Parameter)
            or isinstance(tensor._base, torch.nn.Parameter)
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return None
        storage = tensor.untyped_storage()
        if storage._cdata in self._weights:
            return None
        if tensor.is_contiguous() or is_dense(tensor):
            return int(tensor.storage_offset()) * tensor.element_size(), size
        broadcast = any(
            stride == 0 and count > 1
            for stride, count in zip(tensor.stride(), tensor.shape, strict=True)
        )
        if broadcast or storage.nbytes() > _STORAGE_SHARE * size:
            return None
        return 0, storage.nbytes()

    def version_counter(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty tensor that shares the version counter of `tensor` but not its memory."""
        empty = self._empty.get(tensor.dtype)
        if empty is None:
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self._empty[tensor.dtype] = empty
        counter = tensor.detach()
        counter.data = empty
        return counter
