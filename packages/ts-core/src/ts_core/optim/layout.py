"""Where the parameters of a bucket lie: one flat piece of device memory, and offsets into it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ts_core.device.base import Event
from ts_core.errors import StateError
from ts_core.optim.without_grad import without_grad

SMALL_BYTES = 1 << 20
BUCKET_BYTES = 16 << 20
_ORDINARY = (torch.Tensor, torch.nn.Parameter)
PAD = 256  # elements; the block of 8-bit moments, so that a parameter starts one


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of one update, as torch.optim.AdamW names them."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor (a parameter of FSDP2, say)."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a DTensor; any other tensor itself."""
    if type(tensor) in _ORDINARY or not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def partition(params: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Split a param group into buckets: large parameters alone, small ones together in order.

    DTensors are always alone, since their memory belongs to their owner and is not moved.
    """
    buckets: list[list[torch.nn.Parameter]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    sizes: dict[int, int] = {}
    for param in params:
        size_bytes = param.numel() * param.element_size()
        key = (param.dtype, param.device)
        if size_bytes > SMALL_BYTES or is_sharded(param):
            buckets.append([param])
            continue
        bucket = open_buckets.get(key)
        if bucket is None or sizes[id(bucket)] + size_bytes > BUCKET_BYTES:
            bucket = []
            open_buckets[key] = bucket
            buckets.append(bucket)
            sizes[id(bucket)] = 0
        bucket.append(param)
        sizes[id(bucket)] += size_bytes
    return buckets


class FlatPieces:
    """Tensors of several parameters back to back in one flat tensor.

    Args:
        params: of one dtype and device.

    Attributes:
        dtype: of the parameters.
        offsets: of each parameter, in elements.
        sizes: of each parameter, in elements.
        numel: of the whole piece, padding between parameters included.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self.params = list(params)
        self.dtype = params[0].dtype
        self.sizes = [local(param).numel() for param in params]
        self.offsets: list[int] = []
        offset = 0
        for size in self.sizes:
            self.offsets.append(offset)
            offset += -(-size // PAD) * PAD if len(params) > 1 else size
        self.numel = offset

    @property
    def many(self) -> bool:
        """Whether there is more than one parameter."""
        return len(self.params) > 1

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat [numel] tensor in the parameters' shapes."""
        return [self.view(flat, position) for position in range(len(self.params))]

    def view(self, flat: torch.Tensor, position: int) -> torch.Tensor:
        """One parameter's part of a flat [numel] tensor, in its shape."""
        offset, size = self.offsets[position], self.sizes[position]
        return flat[offset : offset + size].view(local(self.params[position].data).shape)


class FlatLayout(FlatPieces):
    """The parameters of one bucket in flat memory.

    Many small parameters, or one that is not contiguous, are moved into one buffer at
    construction: their values and shapes stay. A single contiguous one is left where it is.

    Args:
        params: of one dtype and device.

    Attributes:
        bases: per parameter, where its random bits start (stochastic rounding): a multiple of PAD
            that depends on its place in the optimizer alone, not on how parameters are grouped.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(params)
        self.bases = list(self.offsets)
        alone = len(params) == 1 and local(params[0]).is_contiguous()
        self._flat = None if alone else self._rehome()
        self._seen = [(-1, -1)] * len(self.params)
        if self._flat is not None:
            self.note_values()

    def flat(self) -> torch.Tensor:
        """The parameters' memory, 1-D [numel], in their dtype, on their device."""
        return self._flat if self._flat is not None else local(self.params[0].data).view(-1)

    def writing(self) -> AbstractContextManager[object]:
        """To be open while an update is queued."""
        return contextlib.nullcontext()

    def begin_update(self) -> list[Event] | None:
        """New values are about to be queued.

        Returns:
            Events that the write must wait for; None for everything queued on the compute stream
            so far, which may read the old values.
        """
        return None

    def note_values(self, positions: Sequence[int] | None = None) -> None:
        """The parameters' present values are ours (all, or those at `positions`)."""
        for position in range(len(self.params)) if positions is None else positions:
            param = self.params[position]
            self._seen[position] = (param._version, local(param.data).data_ptr())

    def note_versions(self, positions: Sequence[int]) -> None:
        """The versions of the parameters at `positions` are ours; their memory has not changed."""
        for position in positions:
            self._seen[position] = (self.params[position]._version, self._seen[position][1])

    def doubt_values(self, position: int) -> None:
        """The parameter's values may not be those that its state is for: as if just written."""
        self._seen[position] = (-1, -1)

    @without_grad
    def foreign_writes(self) -> list[int]:
        """Positions whose values somebody else wrote since `note_values`; noted now.

        A replaced `.data` is copied into the flat memory.
        """
        changed = []
        for position, param in enumerate(self.params):
            here = local(param.data)
            if here.dtype is not self.dtype:
                raise StateError(
                    f"a parameter of shape {tuple(param.shape)} was {self.dtype} when its "
                    f"optimizer state was made and is {here.dtype} now. Convert the model before "
                    f"its first backward, or make a new optimizer."
                )
            now = (param._version, here.data_ptr())
            if now == self._seen[position]:
                continue
            changed.append(position)
            if self._flat is not None:
                view = self.view(self._flat, position)
                if view.data_ptr() != here.data_ptr():
                    view.copy_(param.data)
                    param.data = view
            self.note_values([position])
        return changed

    def _rehome(self) -> torch.Tensor:
        first = self.params[0]
        flat = torch.zeros(self.numel, dtype=self.dtype, device=first.device)
        for param, view in zip(self.params, self.split(flat), strict=True):
            view.copy_(param.data)
            param.data = view
        return flat
