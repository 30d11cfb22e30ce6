"""A trained weight whose value lives in the host image of its block.

The optimizer writes new values there, behind the caller's back; the pager copies them to the device
when the block is needed. What the two must agree on is kept here: which write is on its way, which
copy may still be reading, and which values on the device are old.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from torch import nn

from ts_core.device.base import Device, Event
from ts_core.transfer import PendingCopy

if TYPE_CHECKING:
    from ts_core.store.images import BlockImage
    from ts_core.store.pager import ParamPager


class Writer(Protocol):
    """An update of one weight, queued or done."""

    def ran(self) -> bool:
        """Whether the host's part of it is over."""

    def when_run(self, callback: Callable[[], None]) -> None:
        """Call back once it is (at once if it is already), from whatever thread ends it."""

    def result(self) -> Event | None:
        """Wait until it has run; the event of the device's part, if there is one.

        Raises:
            BaseException: what the update raised.
        """

    def landed(self) -> bool:
        """Whether the new values are in memory."""

    def guard(self, param: nn.Parameter) -> None:
        """Make reads of `param` wait for this update."""

    def release(self, param: nn.Parameter) -> None:
        """Let reads of `param` go on."""


class TrainedHome:
    """The place of one trained weight in an image.

    Attributes:
        image: the image.
        position: of the weight's placement there.
        param: the parameter.
        values_h: its values, 1-D, contiguous, in host memory; what the parameter reads from outside
            its block's computation.
        writer: the last update while it may be on its way.
        pager: moves the image.
    """

    def __init__(self, image: BlockImage, position: int, param: nn.Parameter) -> None:
        self.image = image
        self.position = position
        self.param = param
        self.values_h = image.host_view(position).view(-1)
        self.writer: Writer | None = None
        self.pager: ParamPager | None = None
        self._alone = threading.RLock()

    def addressable(self, device: Device) -> bool:
        """Whether kernels of `device` may read and write the values where they are."""
        return not device.separate_memory or device.kind != "cuda" or self.values_h.is_pinned()

    @property
    def in_parts(self) -> bool:
        """Whether one backward may bring the gradient in several parts.

        On a GPU, where moving a weight between memories makes torch start a new accumulator, a
        block that ran twice in one forward has two.
        """
        pager = self.pager
        return self.image.repeats and pager is not None and pager.copies.device.separate_memory

    def writing(self) -> AbstractContextManager[object]:
        """While open, no other thread starts or finishes a copy of the image."""
        return self._alone if self.pager is None else self.pager.lock

    def take_writes(self) -> tuple[int, int]:
        """What marks the present values; it differs after anybody else has written them."""
        with self.writing():
            self.image.take_writes()
            return self.image.mark(self.position)

    def note_values(self) -> tuple[int, int]:
        """The present values are the optimizer's own; returns their mark."""
        with self.writing():
            self.image.note_version(self.position)
            return self.image.mark(self.position)

    def begin_update(self) -> list[Event]:
        """New values are about to be written: from now on the parameter reads from the image.

        To be called while `writing`, and followed by setting `writer`.

        Returns:
            Events of copies that may still read the old values.
        """
        self.image.bind_one_to_host(self.position)
        self.image.stale = True
        return [] if self.pager is None else self.pager.reading(self.image)

    def bound(self, on_host: bool) -> None:
        """The parameter reads from the image now, or from a copy made after the last update."""
        writer = self.writer
        if writer is None:
            return
        if writer.landed():
            self.writer = None
        if on_host and self.writer is not None:
            writer.guard(self.param)
        else:
            writer.release(self.param)


class DeferredLoad(PendingCopy):
    """A copy of an image that starts when the updates of its weights have run.

    Args:
        writers: of the image's weights.
        start: queues the copy behind some events and returns the event of its completion.
    """

    def __init__(
        self, writers: Sequence[Writer], start: Callable[[Sequence[Event]], Event]
    ) -> None:
        super().__init__()
        self._writers = list(writers)
        self._ran: list[Writer] = []
        self._start = start
        self._step = threading.RLock()
        self._done = False
        self._advance()

    def cancel(self) -> None:
        with self._step:
            if not self._done:
                self._cancelled = True
                self._done = True
                self.abandon()
        if isinstance(self._event, PendingCopy):
            self._event.cancel()

    def queued(self) -> Event:
        event = super().queued()
        return event.queued() if isinstance(event, PendingCopy) else event

    def waiting(self) -> bool:
        """Whether nothing has been queued yet."""
        return not self._done

    def _advance(self) -> None:
        """Queue the copy, or have this called again when the next update has run."""
        with self._step:
            if self._done:
                return
            while self._writers and self._writers[0].ran():
                self._ran.append(self._writers.pop(0))
            if self._writers:
                self._writers[0].when_run(self._advance)
                return
            self._done = True
            try:
                events = [writer.result() for writer in self._ran]
                event = self._start([event for event in events if event is not None])
            except BaseException as error:
                self.fail(error)
            else:
                self.finish(event)
            self._ran.clear()
