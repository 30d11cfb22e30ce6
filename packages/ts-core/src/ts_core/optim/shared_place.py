"""Optimizer state of which the device updates one part over the link, and host threads the rest.

For a large parameter whose gradient comes last: beside its update nothing is left to do, so that
the link or the host threads, whichever does not have it, would stand idle. Of its state a part may
be in device memory, as much as there is room for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch

from ts_core.device.base import Event
from ts_core.optim.device_places import DevicePlace, DeviceWork
from ts_core.optim.gradients import Sealed
from ts_core.optim.newest_first import SubmitNewest
from ts_core.optim.places import HostPlace, Place, Segment, Update
from ts_core.transfer import CopyEngine


class SharedPlace(Place):
    """State in pinned RAM, of which the device updates one part and host threads the rest.

    The first values may have theirs in device memory; the next are updated over the link.

    The gradient stays on the device until both have it. The host's part of it crosses the link in
    pieces, and is updated piece by piece as they arrive, before other host updates that wait.
    `update` waits until that has run, on the thread of host updates, so what is queued for the
    device behind it begins later: it is for what comes last in a step. The thread of host updates
    never waits for that of the device's.

    Args:
        near: "resident", of the first values; None where all state is in host memory.
        link: "zero_copy", of all values; its state of those of `near` is not used.
        host: of those from `first` on, over the same state.
        first: how many values the device updates, those of `near` included.
        work: streams of the device's updates.
        copies: engine of the link.
        gradient_h: host memory for the gradients of `host`; None where the device has no memory of
            its own.
        submit: queues work on the thread of host updates, the newest first.
        piece: values of the gradient that cross the link, and are updated, at a time.
    """

    name = "shared"
    on_device = True
    over_link = True

    def __init__(
        self,
        near: DevicePlace | None,
        link: DevicePlace,
        host: HostPlace,
        first: int,
        work: DeviceWork,
        copies: CopyEngine,
        gradient_h: torch.Tensor | None,
        submit: SubmitNewest[Event | None],
        piece: int,
    ) -> None:
        self._near, self._link, self._host, self._first = near, link, host, first
        self._near_values = 0 if near is None else near.state.exp_avg.numel()
        self._work = work
        self._copies = copies
        self._gradient_h = gradient_h
        self._submit = submit
        self._piece = piece
        self._seconds = 0.0

    @property
    def link(self) -> DevicePlace:
        """All of the state that is in host memory, as the device reads and writes it."""
        return self._link

    @property
    def cuts(self) -> tuple[int, int]:
        """Where the values end whose state is in device memory, and those that the link updates."""
        return self._near_values, self._first

    @property
    def seconds(self) -> float:  # type: ignore[override]
        """Of the host's part of the last update."""
        return self._seconds

    def update(self, update: Update, scale: float) -> Event | None:
        parts: list[Update] = []

        def on_host() -> Event | None:
            seconds, landed = 0.0, None
            for part in parts:
                landed = self._host.update(part, scale) or landed  # in order, on one stream
                seconds += self._host.seconds
            self._seconds = seconds
            return landed

        by_device: list[tuple[DevicePlace, int, int]] = [
            (self._link, self._near_values, self._first)
        ]
        if self._near is not None:
            by_device.append((self._near, 0, self._near_values))
        job: Future[Event | None] | None = None
        done: list[Event] = []
        try:
            for part in self._parts_of_host(update):
                parts.append(part)
            job = self._on_host(on_host, parts[0].gradients.landed)
            # Its gradients are kept until all parts have been done.
            for place, start, end in by_device:
                segments = list(_cut(update.segments, start, end))
                event = place.update(replace(update, segments=segments, held=True), scale)
                done += [] if event is None else [event]
            landed = job.result()
            events = [*done, *([] if landed is None else [landed])]
            both = self._work.launch(_nothing, events, over_link=True)
        except BaseException:
            # Nobody is told before all are over: what they read and write is used again then.
            if job is not None:
                job.exception()
            if parts:
                parts[-1].gradients.land(self._work.device)
            for event in done:
                self._work.device.host_wait(event)
            raise
        if not update.held:
            self._work.keep(both, [update.gradients], over_link=True)
        return both

    def _parts_of_host(self, update: Update) -> Iterator[Update]:
        """The host's part in pieces, whose gradients are on their way."""
        gradient = update.gradients.flat[self._first :]
        numel = gradient.numel()
        segments = list(_within(update.segments, self._first, self._first + numel))
        after = update.gradients.ready(self._work.device)
        for start in range(0, numel, self._piece):
            end = min(start + self._piece, numel)
            rest = Sealed(gradient)
            if self._gradient_h is not None:
                arrived = self._copies.d2h(
                    self._gradient_h[start:end], gradient[start:end], after, keep_source=False
                )
                rest = Sealed(self._gradient_h, arrived=arrived)
            yield replace(
                update,
                target=update.target[self._first :],
                gradients=rest,
                segments=list(_cut(segments, start, end)),
            )

    def _on_host(
        self, work: Callable[[], Event | None], ready: Callable[[], bool]
    ) -> Future[Event | None]:
        """Queue the host's part; where no thread takes work any more, it is done here and now.

        So at the end of the interpreter, which waits for updates that have been queued.
        """
        try:
            return self._submit(work, ready)
        except RuntimeError:
            job: Future[Event | None] = Future()
            try:
                job.set_result(work())
            except BaseException as error:  # for who asks for the result
                job.set_exception(error)
            return job

    def live(self) -> dict[str, torch.Tensor]:
        return self._link.live() if self._near is None else {}

    def read(self, name: str, offset: int, out: torch.Tensor) -> None:
        near = self._of_near(offset, out.numel())
        if self._near is not None and near:
            self._near.read(name, offset, out[:near])
        self._link.read(name, offset + near, out[near:])

    def write(self, name: str, offset: int, values: torch.Tensor) -> None:
        near = self._of_near(offset, values.numel())
        if self._near is not None and near:
            self._near.write(name, offset, values[:near])
        self._link.write(name, offset + near, values[near:])

    def take_values(self, offset: int, values: torch.Tensor) -> None:
        near = self._of_near(offset, values.numel())
        if self._near is not None and near:
            self._near.take_values(offset, values[:near])
        self._link.take_values(offset + near, values[near:])
        self.take_rounded(offset, values)

    def _of_near(self, offset: int, count: int) -> int:
        """How many of `count` values from `offset` on have their state in device memory."""
        return min(max(self._near_values - offset, 0), count)

    def take_rounded(self, offset: int, values: torch.Tensor) -> None:
        before = min(max(self._first - offset, 0), values.numel())
        if before < values.numel():  # the host has a copy of its part
            self._host.take_rounded(offset + before - self._first, values[before:])

    def host_bytes(self) -> int:
        copies = 0 if self._gradient_h is None else 2 * self._gradient_h.nbytes
        return self._link.host_bytes() + copies

    def device_bytes(self) -> int:
        return 0 if self._near is None else self._near.device_bytes()


def _within(segments: Sequence[Segment], start: int, end: int) -> Iterator[Segment]:
    """What lies between, counted from `start`."""
    for segment in _cut(segments, start, end):
        yield replace(segment, offset=segment.offset - start)


def _cut(segments: Sequence[Segment], start: int, end: int) -> Iterator[Segment]:
    for segment in segments:
        low, high = max(segment.offset, start), min(segment.offset + segment.size, end)
        if low < high:
            base = segment.base + low - segment.offset
            yield replace(segment, offset=low, size=high - low, base=base)


def _nothing() -> None:
    """The event of a launch follows what it waits for."""
