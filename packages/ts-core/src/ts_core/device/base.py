"""What streaming asks of an accelerator: streams, events, async copies, memory and its limit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ts_core.memory.ledger import Ledger


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the work before the point has finished."""

    def synchronize(self) -> None:
        """Block the calling host thread until it has."""


class Timestamp(Protocol):
    """The time at which a point of the compute stream was reached."""

    def seconds_since(self, earlier: Any) -> float | None:
        """Seconds from `earlier` (of the same device) to this; None while one lies ahead."""


class Stream(Protocol):
    """A FIFO of device work."""

    name: str

    def wait_event(self, event: Event) -> None:
        """Make later work of this stream wait for `event`."""

    def record(self) -> Event:
        """An event after everything queued on this stream so far."""

    def synchronize(self) -> None:
        """Block the calling host thread until everything queued has finished."""


class Device(ABC):
    """An accelerator: `cuda`, or `host` where there is none.

    Attributes:
        kind: "cuda" or "host".
        torch_device: where resident parameters, inputs and outputs live.
        separate_memory: whether device memory is other memory than the host's (cuda), so that
            resident tensors must be moved there.
        pool: ledger of the device memory that streaming holds (resident blocks and slots); its
            limit is enforced on the host device.
        peaks: how many times `reset_peak` was called, for this memory.
    """

    kind: str
    torch_device: torch.device
    separate_memory: bool
    pool: Ledger
    peaks = 0

    @abstractmethod
    def new_stream(self, name: str) -> Stream:
        """A new stream for copies."""

    @abstractmethod
    def compute_stream(self) -> Stream:
        """The stream that PyTorch operations of the calling thread go to."""

    def compute_key(self) -> int:
        """A number that tells the calling thread's compute stream from others."""
        return 0

    @abstractmethod
    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """Queue `dst <- src` on `stream`; both contiguous, same dtype and size.

        The caller keeps both alive and unmodified until an event recorded afterwards has passed.
        """

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], stream: Stream) -> None:
        """`copy` of each (dst, src) in turn, issued together."""
        for dst, src in pairs:
            self.copy(dst, src, stream)

    @abstractmethod
    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        """Queue device operations on `stream`: `work` calls them, now (cuda) or there (host).

        The caller keeps their tensors alive until an event recorded afterwards has passed.
        """

    @abstractmethod
    def delay(self, stream: Stream, seconds: float) -> None:
        """Occupy `stream` for about `seconds` (fault injection in tests)."""

    @abstractmethod
    def host_wait(self, event: Event) -> None:
        """Block the calling host thread until `event`, without holding a core."""

    @abstractmethod
    def timestamp(self) -> Timestamp:
        """When the compute stream of the calling thread gets here; read without waiting."""

    @abstractmethod
    def allocate(self, size_bytes: int) -> torch.Tensor:
        """A uint8 tensor of device memory, 256-byte aligned; the caller accounts it in `pool`."""

    def take_workspaces(self) -> None:
        """Let torch allocate now what it needs once to multiply matrices, if anything."""
        return None

    def workspace_bytes(self) -> int:
        """What torch's workspaces take on each stream that multiplies matrices, at most."""
        return 0

    @abstractmethod
    def mapped(self, host: torch.Tensor) -> torch.Tensor | None:
        """`host` as a tensor of the device, whose kernels read it over the link.

        Args:
            host: contiguous, in memory of the arena, page-locked; kept alive by the result.

        Returns:
            None where the device cannot read it.
        """

    @abstractmethod
    def usable_bytes(self) -> int | None:
        """Device memory this process may use in all, or None when it is unbounded (host)."""

    def grow_segments(self) -> str | None:
        """See that free device memory does not lie in pieces, where that can be had.

        It is for the whole process, and stays.

        Returns:
            What was done, or why not, in words; None where there is nothing to tell.
        """
        return None

    @abstractmethod
    def set_limit(self, limit_bytes: int | None) -> None:
        """Make the device behave as if it had `limit_bytes` (None: lift the limit)."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start `peak_allocated` again from what is allocated now."""

    @contextmanager
    def trial(self) -> Iterator[None]:
        """What is allocated within, and freed again, leaves no trace in `peak_allocated`."""
        yield

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """allocated, reserved and peak_allocated bytes of device memory."""
