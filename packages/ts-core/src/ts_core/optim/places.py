"""Where a bucket's optimizer state lives, and how it is updated there.

- host: state in RAM, host threads; gradients come over the link, new values go back.
- zero_copy, resident: updated by the device (`device_places`).
- shared: one part as in zero_copy, the rest as in host (`shared_place`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ts_core import _native
from ts_core.device.base import Event
from ts_core.memory.arena import PinnedArena
from ts_core.optim.device_update import DTYPE_NAMES, DeviceState
from ts_core.optim.gradients import Sealed
from ts_core.optim.layout import Hyper
from ts_core.optim.moments import Moments
from ts_core.transfer import CopyEngine, PendingCopy, edges

NAMES = ("host", "zero_copy", "resident", "shared")


@dataclass(frozen=True)
class Segment:
    """A run of values with a gradient and the same step count; `base` counts its random bits."""

    offset: int
    size: int
    step: int
    base: int = 0


@dataclass
class Update:
    """One queued update of a bucket.

    Attributes:
        target: the parameters' flat memory (on the device, or in the image of a paged block).
        gradients: complete for this step.
        segments: what has a gradient.
        hyper: hyper-parameters.
        behind: events after the last reads of the old values.
        held: somebody else keeps the gradients until the update has read them.
    """

    target: torch.Tensor
    gradients: Sealed
    segments: Sequence[Segment]
    hyper: Hyper
    behind: Sequence[Event]
    held: bool = False


class Place(ABC):
    """State of `numel` values and their update.

    Attributes:
        name: one of NAMES.
        on_device: the device does the update, and gradients stay there for it.
        over_link: it does so with state in host memory.
        rounds_at_random: it uses the random bits that a segment's `base` counts.
        seconds: of the last update's own work where the host does it.
    """

    name: str
    on_device: bool
    over_link = False
    rounds_at_random = False
    seconds = 0.0

    @abstractmethod
    def update(self, update: Update, scale: float) -> Event | None:
        """Run it (worker thread); returns the event of the new values' arrival, or None if done."""

    def ready(self, update: Update) -> bool:
        """Whether `update` would not make the worker thread wait."""
        return update.gradients.landed()

    @abstractmethod
    def live(self) -> dict[str, torch.Tensor]:
        """Flat fp32 tensors of the state that may be handed out as they are, by name."""

    @abstractmethod
    def read(self, name: str, offset: int, out: torch.Tensor) -> None:
        """Write state values from `offset` on to `out` (fp32, 1-D)."""

    @abstractmethod
    def write(self, name: str, offset: int, values: torch.Tensor) -> None:
        """Take state values from `offset` on (fp32, 1-D, any device)."""

    @abstractmethod
    def host_bytes(self) -> int:
        """Host memory held by state (and the parameters' copy that crosses the link)."""

    def device_bytes(self) -> int:
        """Device memory held by state."""
        return 0

    def take_values(self, offset: int, values: torch.Tensor) -> None:
        """The user wrote these parameter values (1-D, on the device): they count from now on.

        A master copy keeps its digits where it rounds to the very value that was written (a state
        dict loaded back, say).
        """
        master = self.live().get("master")
        if master is not None:
            held = master[offset : offset + values.numel()]
            written = values.to(held.device)
            same = held.to(written.dtype) == written
            self.write("master", offset, torch.where(same, held, written.float()))
        self.take_rounded(offset, values)

    def take_rounded(self, offset: int, values: torch.Tensor) -> None:  # noqa: B027
        """The same, but the master copy stays: it holds more digits of the same values."""


class HostPlace(Place):
    """State in RAM, updated by host threads.

    Args:
        target: the parameters' flat memory, for their present values.
        kind: of the moments: "float32", "bfloat16", "int8".
        seed: of stochastic rounding.
        threads: returns the number of host threads (0: all usable cores).
        piece: values per native call and copy, so that long tensors overlap with the link.
        pinned: keep the state in page-locked memory.
        in_place: the parameters' memory is the host's, and they are updated there.
        state: fp32 state in host memory to work on; None makes it.
    """

    name = "host"
    on_device = False

    def __init__(
        self,
        target: torch.Tensor,
        copies: CopyEngine,
        arena: PinnedArena,
        *,
        kind: str,
        seed: int,
        threads: Callable[[], int],
        piece: int,
        pinned: bool,
        in_place: bool = False,
        state: DeviceState | None = None,
    ) -> None:
        numel, dtype = target.numel(), target.dtype
        empty = pinned_zeros(arena) if pinned else None
        self._copies = copies
        self._device = copies.device
        self._dtype = dtype
        self._threads = threads
        self._piece = piece
        self.rounds_at_random = kind != "float32"
        if state is None:
            self.moments = Moments(numel, kind, seed, empty)
        else:
            self.moments = Moments.over(state.exp_avg, state.exp_avg_sq)
        self.master: torch.Tensor | None = None if state is None else state.master
        if dtype is not torch.float32 and state is None:
            self.master = (empty or _zeros)(numel, torch.float32)
            self.master.copy_(target)
        self._param_h: torch.Tensor | None = None
        if self._device.separate_memory and not in_place:
            self._param_h = arena.empty((numel,), dtype, tag="parameters")
            self._param_h.copy_(target)

    def update(self, update: Update, scale: float) -> Event | None:
        gradient = update.gradients.land(self._device)
        if self._param_h is None:
            for reader in update.behind:
                self._wait(reader)
        start = time.perf_counter()
        event = None
        for segment in update.segments:
            for offset in range(segment.offset, segment.offset + segment.size, self._piece):
                size = min(self._piece, segment.offset + segment.size - offset)
                self._native(update, gradient, offset, size, segment, scale)
                if self._param_h is not None:
                    end = offset + size
                    event = self._copies.values_h2d(
                        update.target[offset:end], self._param_h[offset:end], after=update.behind
                    )
        self.seconds = time.perf_counter() - start
        return event

    def ready(self, update: Update) -> bool:
        in_place = self._param_h is None
        unread = not in_place or all(reader.query() for reader in update.behind)
        return unread and super().ready(update)

    def _wait(self, reader: Event) -> None:
        event = reader.started() if isinstance(reader, PendingCopy) else reader
        if event is not None:
            self._device.host_wait(event)

    def _native(
        self,
        update: Update,
        gradient: torch.Tensor,
        offset: int,
        size: int,
        segment: Segment,
        scale: float,
    ) -> None:
        edges.pause_thread()
        target = update.target if self._param_h is None else self._param_h
        hyper = update.hyper
        _native.adamw_step(
            param_ptr=target.data_ptr() + offset * target.element_size(),
            param_dtype=DTYPE_NAMES[target.dtype],
            grad_ptr=gradient.data_ptr() + offset * gradient.element_size(),
            grad_dtype=DTYPE_NAMES[gradient.dtype],
            master_ptr=0 if self.master is None else self.master.data_ptr() + offset * 4,
            n=size,
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            step=segment.step,
            grad_scale=scale,
            threads=self._threads(),
            base=segment.base + offset - segment.offset,
            **self.moments.pointers(offset),  # type: ignore[arg-type]
        )
        edges.pause_thread()

    def live(self) -> dict[str, torch.Tensor]:
        found = dict(self.moments.stored) if self.moments.kind == "float32" else {}
        if self.master is not None:
            found["master"] = self.master
        return found

    def read(self, name: str, offset: int, out: torch.Tensor) -> None:
        if name == "master":
            assert self.master is not None
            out.copy_(self.master[offset : offset + out.numel()])
        else:
            self.moments.read(name, offset, out)

    def write(self, name: str, offset: int, values: torch.Tensor) -> None:
        if name == "master":
            assert self.master is not None
            self.master[offset : offset + values.numel()].copy_(values)
        else:
            self.moments.write(name, offset, values.to("cpu", torch.float32))

    def take_rounded(self, offset: int, values: torch.Tensor) -> None:
        if self._param_h is not None:
            self._param_h[offset : offset + values.numel()].copy_(values)

    def host_bytes(self) -> int:
        copies = [tensor for tensor in (self.master, self._param_h) if tensor is not None]
        return self.moments.host_bytes() + sum(t.numel() * t.element_size() for t in copies)


def pinned_zeros(arena: PinnedArena) -> Callable[[int, torch.dtype], torch.Tensor]:
    def make(count: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = arena.empty((count,), dtype, tag="optimizer state")
        tensor.zero_()
        return tensor

    return make


def _zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype)
