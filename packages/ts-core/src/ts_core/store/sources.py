"""Where the bytes of an image are kept, and how they get from there into a device slot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from ts_core.device.base import Event
from ts_core.store.staging import MemoryReader, Stager
from ts_core.transfer import CopyEngine
from ts_core.transfer.copies import After

if TYPE_CHECKING:
    from ts_core.store.disk import DiskFile


class Source(Protocol):
    """The home of one image's bytes.

    Attributes:
        kind: "memory", "staged" or "disk".
        buffer_h: uint8 [size_bytes] in host address space: reading and writing it reads and writes
            the image, wherever it is kept.
        staged_bytes: bytes that the stager has put into device memory from here.
    """

    kind: str
    buffer_h: torch.Tensor

    @property
    def staged_bytes(self) -> int: ...

    def load(self, copies: CopyEngine, dst_d: torch.Tensor, after: After) -> Event:
        """Start a copy of the whole image to `dst_d` behind `after`.

        Returns:
            The event of its completion, or a `PendingCopy` that stands for it.
        """

    def wrote(self) -> None:
        """Something was written into `buffer_h`.

        Raises:
            DataError: it cannot be kept.
        """

    def remove(self) -> None:
        """Nothing will be loaded from here any more; `buffer_h` stays as long as it is used."""


class MemorySource:
    """Bytes in host memory that go to the device in one copy.

    Args:
        buffer_h: page-locked where a GPU is to copy it at full speed.
    """

    kind = "memory"
    staged_bytes = 0

    def __init__(self, buffer_h: torch.Tensor) -> None:
        self.buffer_h = buffer_h

    def load(self, copies: CopyEngine, dst_d: torch.Tensor, after: After) -> Event:
        return copies.h2d(dst_d, self.buffer_h, after=after)

    def wrote(self) -> None:
        return None

    def remove(self) -> None:
        return None


class StagedSource:
    """Bytes in pageable memory that go to the device through the stager's ring."""

    kind = "staged"

    def __init__(self, buffer_h: torch.Tensor, stager: Stager) -> None:
        self.buffer_h = buffer_h
        self._reader = MemoryReader(buffer_h)
        self._stager = stager

    @property
    def staged_bytes(self) -> int:
        return self._reader.loaded_bytes

    def load(self, copies: CopyEngine, dst_d: torch.Tensor, after: After) -> Event:
        return self._stager.load(dst_d, self._reader, after)

    def wrote(self) -> None:
        return None

    def remove(self) -> None:
        return None


class DiskSource:
    """Bytes in a file that go to the device through the stager's ring."""

    kind = "disk"

    def __init__(self, file: DiskFile, stager: Stager) -> None:
        self.file = file
        self.buffer_h = file.buffer_h
        self._stager = stager

    def load(self, copies: CopyEngine, dst_d: torch.Tensor, after: After) -> Event:
        return self._stager.load(dst_d, self.file, after)

    @property
    def staged_bytes(self) -> int:
        return self.file.loaded_bytes

    def wrote(self) -> None:
        self.file.flush()

    def remove(self) -> None:
        self.file.remove()
