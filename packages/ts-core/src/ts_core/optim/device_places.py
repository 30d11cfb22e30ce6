"""Optimizer state that the device updates.

- zero_copy: state in pinned RAM, read and written over the link by the update's kernel.
- streamed: state in pinned RAM, copied through a ring of device buffers, both directions at once.
- resident: state in device memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ts_core.device.base import Device, Event, Stream
from ts_core.memory.arena import PinnedArena
from ts_core.optim.device_update import DeviceState, update_on_device
from ts_core.optim.places import Place, Update, pinned_zeros
from ts_core.transfer import CopyEngine, edges


class DeviceWork:
    """The streams that device updates run on, and what must stay alive until they have run.

    Streamed state has copy streams of its own: gradients and new values of other buckets would
    wait behind it.

    Args:
        device: where the parameters are.
        max_inflight_bytes: of the copies of streamed state, and of gradients kept for it.
    """

    def __init__(self, device: Device, max_inflight_bytes: int) -> None:
        self.copies = CopyEngine(device, max_inflight_bytes)
        self.device = device
        self.stream: Stream = self.device.new_stream("optimizer")
        self._kept: deque[tuple[Event, int, object]] = deque()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def launch(self, work: Callable[[], None], after: Sequence[Event]) -> Event:
        """Queue `work` on the stream behind `after`; returns the event of its completion."""
        for event in after:
            edges.wait(self.device, self.stream, event)
        edges.pause(self.device, self.stream)
        self.device.launch(self.stream, work)
        edges.pause(self.device, self.stream)
        return self.stream.record()

    def keep(self, event: Event, tensor: torch.Tensor) -> None:
        """Hold `tensor` until `event`; beyond the limit in flight, wait for the oldest."""
        size = tensor.numel() * tensor.element_size()
        with self._lock:
            self._kept.append((event, size, tensor))
            self._kept_bytes += size
            while self._kept:
                oldest, oldest_size, _ = self._kept[0]
                if not oldest.query():
                    if self._kept_bytes <= self.copies.max_inflight_bytes:
                        break
                    self.device.host_wait(oldest)
                self._kept.popleft()
                self._kept_bytes -= oldest_size


class DevicePlace(Place):
    """State that a device kernel updates where it is: pinned RAM (zero copy) or device memory.

    Args:
        target: the parameters' flat memory, for their present values.
        work: stream of the updates.
        arena: where pinned state comes from.
        resident: state in device memory; else in pinned RAM.
    """

    on_device = True

    def __init__(
        self, target: torch.Tensor, work: DeviceWork, arena: PinnedArena, *, resident: bool
    ) -> None:
        self.name = "resident" if resident else "zero_copy"
        self._work = work
        where = work.device.torch_device if resident else None
        make = (lambda n, d: torch.zeros(n, dtype=d, device=where)) if resident else None
        self.state = _state(target, make or pinned_zeros(arena))

    def update(self, update: Update, scale: float) -> Event | None:
        gradient = update.gradients.flat
        behind = update.gradients.behind
        after = [update.behind] if behind is None else [update.behind, behind]

        def work() -> None:
            for segment in update.segments:
                start, end = segment.offset, segment.offset + segment.size
                update_on_device(
                    update.target[start:end],
                    gradient[start:end],
                    self.state.slice(start, end),
                    update.hyper,
                    segment.step,
                    scale,
                    over_link=self.name == "zero_copy",
                )

        event = self._work.launch(work, after)
        self._work.keep(event, gradient)
        return event

    def live(self) -> dict[str, torch.Tensor]:
        found = {"exp_avg": self.state.exp_avg, "exp_avg_sq": self.state.exp_avg_sq}
        if self.state.master is not None:
            found["master"] = self.state.master
        return found

    def read(self, name: str, offset: int, out: torch.Tensor) -> None:
        out.copy_(self.live()[name][offset : offset + out.numel()])

    def write(self, name: str, offset: int, values: torch.Tensor) -> None:
        self.live()[name][offset : offset + values.numel()].copy_(values)

    def host_bytes(self) -> int:
        return 0 if self.name == "resident" else self._bytes()

    def device_bytes(self) -> int:
        return self._bytes() if self.name == "resident" else 0

    def _bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.state.tensors())


@dataclass
class _StreamSlot:
    state: DeviceState
    free: Event | None = None


class StreamRing:
    """Device buffers that streamed state passes through, piece by piece.

    Args:
        work: stream of the updates.
        piece: values per buffer.
        master: whether there is room for a master copy.
        count: buffers.
    """

    def __init__(self, work: DeviceWork, piece: int, master: bool, count: int = 3) -> None:
        self.work = work
        self.piece = piece
        where = work.device.torch_device
        self._slots = [
            _StreamSlot(
                DeviceState(
                    torch.zeros(piece, device=where),
                    torch.zeros(piece, device=where),
                    torch.zeros(piece, device=where) if master else None,
                )
            )
            for _ in range(count)
        ]
        self._next = 0

    def take(self) -> _StreamSlot:
        """The next buffer; its `free` event says when it may be written."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        return slot

    def device_bytes(self) -> int:
        """Device memory held."""
        return sum(t.numel() * 4 for slot in self._slots for t in slot.state.tensors())


class StreamedPlace(DevicePlace):
    """State in pinned RAM that passes through the device: copied in, updated, copied back."""

    def __init__(self, target: torch.Tensor, ring: StreamRing, arena: PinnedArena) -> None:
        super().__init__(target, ring.work, arena, resident=False)
        self.name = "streamed"
        self._ring = ring
        self._left: Event | None = None  # after it the state is in RAM again

    def read(self, name: str, offset: int, out: torch.Tensor) -> None:
        self._settle()
        super().read(name, offset, out)

    def write(self, name: str, offset: int, values: torch.Tensor) -> None:
        self._settle()
        super().write(name, offset, values)

    def _settle(self) -> None:
        """The copies back of the last update may still be on their way when its values are used."""
        if self._left is not None:
            self._work.device.host_wait(self._left)

    def update(self, update: Update, scale: float) -> Event | None:
        gradient = update.gradients.flat
        behind = update.gradients.behind
        after = [update.behind] if behind is None else [update.behind, behind]
        copies = self._work.copies
        event = None
        for segment in update.segments:
            end = segment.offset + segment.size
            for start in range(segment.offset, end, self._ring.piece):
                stop = min(start + self._ring.piece, end)
                slot = self._ring.take()
                inside = slot.state.slice(0, stop - start)
                outside = self.state.slice(start, stop)
                arrived = [
                    copies.h2d(there, here, after=[slot.free, self._left])
                    for there, here in zip(inside.tensors(), outside.tensors(), strict=True)
                ]
                event = self._work.launch(
                    _piece_work(update, gradient, inside, start, stop, segment.step, scale),
                    [*after, arrived[-1]],
                )
                left = [
                    copies.d2h(here, there, after=event)
                    for there, here in zip(inside.tensors(), outside.tensors(), strict=True)
                ]
                slot.free = left[-1]
        if event is not None:
            self._left = slot.free
            self._work.keep(event, gradient)
        return event


def _piece_work(
    update: Update,
    gradient: torch.Tensor,
    inside: DeviceState,
    start: int,
    stop: int,
    step: int,
    scale: float,
) -> Callable[[], None]:
    def work() -> None:
        update_on_device(
            update.target[start:stop], gradient[start:stop], inside, update.hyper, step, scale
        )

    return work


def _state(target: torch.Tensor, make: Callable[[int, torch.dtype], torch.Tensor]) -> DeviceState:
    numel = target.numel()
    master = None
    if target.dtype is not torch.float32:
        master = make(numel, torch.float32)
        master.copy_(target)
    return DeviceState(make(numel, torch.float32), make(numel, torch.float32), master)
