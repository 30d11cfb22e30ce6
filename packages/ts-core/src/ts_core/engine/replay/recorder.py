"""What makes a recording of some device work, and runs it again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch


class Recorded(ABC):
    """Work that was recorded: the same operations on the same memory, any number of times."""

    @abstractmethod
    def replay(self) -> None:
        """Queue it on the current stream."""


class Recorder(ABC):
    """Records work of one device. Memory that the work itself allocates belongs to the recordings,
    is shared by all of them, and holds nothing of use after any replay.

    Attributes:
        broken: a recording failed half-way, so that none should follow.
    """

    broken = False

    @abstractmethod
    def warm_up(self, work: Callable[[], None]) -> None:
        """Run `work` for real, so that kernels are loaded and tuned before it is recorded."""

    @abstractmethod
    def record(self, work: Callable[[], None]) -> Recorded:
        """Record what `work` does with the device; whether it runs as well is left open.

        Raises:
            Exception: whatever `work` raised, or the device about it.
        """

    @abstractmethod
    def place(self) -> Any:
        """The stream of the caller; recordings share memory, so all replays are to be on one."""

    @abstractmethod
    def pool_bytes(self) -> int:
        """Device memory that recordings hold for what they allocate."""

    @abstractmethod
    def forget(self) -> None:
        """All recordings are to be dropped: waits for what they do, and later ones share other
        memory."""

    @property
    @abstractmethod
    def generator(self) -> torch.Generator:
        """Where the device's random numbers come from."""
