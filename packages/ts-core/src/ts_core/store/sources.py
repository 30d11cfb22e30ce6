"""Where the bytes of an image are kept, and how they get from there into a device slot."""

from __future__ import annotations

from typing import Protocol

import torch

from ts_core.device.base import Event
from ts_core.transfer import CopyEngine
from ts_core.transfer.copies import After


class Source(Protocol):
    """The home of one image's bytes.

    Attributes:
        kind: "memory", "staged" or "disk".
        buffer_h: uint8 [size_bytes] in host address space: reading and writing it reads and writes
            the image, wherever it is kept.
    """

    kind: str
    buffer_h: torch.Tensor

    def load(self, copies: CopyEngine, dst_d: torch.Tensor, after: After) -> Event:
        """Start a copy of the whole image to `dst_d` behind `after`.

        Returns:
            The event of its completion, or a `PendingCopy` that stands for it.
        """


class MemorySource:
    """Bytes in host memory that go to the device in one copy, page-locked or not."""

    kind = "memory"

    def __init__(self, buffer_h: torch.Tensor) -> None:
        self.buffer_h = buffer_h

    def load(self, copies: CopyEngine, dst_d: torch.Tensor, after: After) -> Event:
        return copies.h2d(dst_d, self.buffer_h, after=after)
