"""Gradients of one bucket, from the first that comes to the one flat tensor the update reads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from ts_core.device.base import Device, Event, Stream
from ts_core.memory.arena import PinnedArena
from ts_core.optim.device_norms import in_one, norms_of
from ts_core.optim.layout import FlatPieces
from ts_core.optim.parts import PartSums
from ts_core.optim.without_grad import without_grad
from ts_core.transfer import CopyEngine


@dataclass
class Sealed:
    """The complete gradients of a step.

    Attributes:
        flat: [numel] in the parameters' dtype, where the update runs; parts of parameters without
            a gradient are undefined.
        behind: event on the compute stream after which `flat` is final (device memory).
        closed: event on the compute stream when the last gradient had come.
        stream: `Device.compute_key` of the stream that these two are of.
        arrived: event after which `flat` holds the first part (host memory).
        summed: done when all later parts have been added.
        made_on: the compute stream that `flat` was allocated for; None where it stays what it is.
    """

    flat: torch.Tensor
    behind: Event | None = None
    closed: Event | None = None
    stream: int | None = None
    arrived: Event | None = None
    summed: Future[None] | None = None
    made_on: Stream | None = None

    def land(self, device: Device) -> torch.Tensor:
        """Wait until `flat` in host memory is complete (worker thread); returns it."""
        if self.arrived is not None:
            device.host_wait(self.arrived)
        if self.summed is not None:
            self.summed.result()
        return self.flat

    def landed(self) -> bool:
        """Whether `land` would not wait."""
        arrived = self.arrived is None or self.arrived.query()
        return arrived and (self.summed is None or self.summed.done())

    def ready(self, device: Device) -> list[Event]:
        """Events after which `flat` may be read by the device (worker thread).

        Waits for parts that the host adds.
        """
        if self.summed is not None:
            self.land(device)
        return [event for event in (self.behind, self.arrived) if event is not None]


class Gradients:
    """Collects gradients where the update will read them.

    Args:
        layout: where each parameter's gradient lies in the flat tensor.
        copies: engine of the link.
        arena: where host buffers that cross the link come from.
        parts: adds what later passes bring to what is in host memory.
        to_host: gradients leave for host memory as they come; else they stay where they are.

    Attributes:
        several: a gradient of this step comes in several passes or parts, so that none is kept on
            the device, or measured there, on its way to the host.
    """

    def __init__(
        self,
        layout: FlatPieces,
        copies: CopyEngine,
        arena: PinnedArena,
        parts: PartSums,
        to_host: bool,
    ) -> None:
        self._layout = layout
        self._copies = copies
        self._parts = parts
        self._to_host = to_host and copies.device.separate_memory
        dtype, numel = layout.dtype, layout.numel
        self._host = arena.empty((numel,), dtype, tag="gradients") if self._to_host else None
        if self._host is not None:
            self._host.zero_()
        self._stage = (
            torch.zeros(numel, dtype=dtype, device=copies.device.torch_device)
            if layout.many
            else None
        )
        self._views = [] if self._stage is None else layout.split(self._stage)
        self.several = False
        self._single: torch.Tensor | None = None
        self._made_on: Stream | None = None
        self._arrived: Event | None = None
        self._summed: Future[None] | None = None

    def host_bytes(self) -> int:
        """Host memory held."""
        held = self._host
        if held is None and not self._copies.device.separate_memory:
            held = self._stage
        return 0 if held is None else held.numel() * held.element_size()

    @without_grad
    def absorb(
        self,
        pending: dict[int, torch.Tensor],
        counts: Sequence[int],
        new: bool = True,
    ) -> None:
        """Take gradients of one backward; `counts` are the passes so far, these included.

        Args:
            pending: by position.
            counts: passes per position.
            new: False for another part of gradients that have been taken already.
        """
        if not pending:
            return
        if self._layout.many:
            items = pending.items()
            first = [(self._views[p], g) for p, g in items if counts[p] == 1]
            later = [(self._views[p], g) for p, g in items if counts[p] > 1]
            if first:
                torch._foreach_copy_([v for v, _ in first], [g for _, g in first])
            if later:
                torch._foreach_add_([v for v, _ in later], [g for _, g in later])
            return
        flat = pending[0].contiguous().view(-1)
        if not self._to_host:
            if self._single is None:
                self._made_on = self._copies.device.compute_stream()
            self._single = flat if self._single is None else self._single.add_(flat)
            return
        assert self._host is not None
        behind = self._copies.record_compute()
        if counts[0] == 1 and new:
            if self._summed is not None:
                self._summed.exception()  # of a step that was dropped: it still writes there
                self._summed = None
            self._single = None if self.several else flat
            self._arrived = self._copies.d2h(self._host, flat, after=behind, made_here=True)
        else:
            self._single = None
            self._summed = self._parts.add(self._host, flat, behind)

    @without_grad
    def seal(self, counts: Sequence[int], measure: bool) -> tuple[Sealed, torch.Tensor | None]:
        """All gradients of the step are here.

        Args:
            counts: passes per parameter; those with 0 have no gradient.
            measure: have the device measure them, where it can: where they are whole on a device of
                its own. (The host measures in fp64 too: the clipping factor does not depend on who
                measured.)

        Returns:
            What the update needs, and the 2-norm of each gradient (1-D fp64) if it was measured.
            Where gradients were summed over several passes on their way to the host, the host
            measures what has landed.
        """
        copies = self._copies
        whole = self._stage if self._layout.many else self._single
        if self._layout.many and not all(counts):
            missing = [view for view, count in zip(self._views, counts, strict=True) if not count]
            torch._foreach_zero_(missing)
        at_once = not (self._to_host and self.several)
        norms = None
        if measure and whole is not None and at_once and copies.device.separate_memory:
            norms = in_one(norms_of(self._views if self._layout.many else [whole]))
        closed, stream = copies.record_compute(), copies.device.compute_key()
        if not self._to_host:
            assert whole is not None
            made_on = None if self._layout.many else self._made_on
            sealed = Sealed(whole, behind=closed, closed=closed, stream=stream, made_on=made_on)
        else:
            assert self._host is not None
            if self._stage is not None:
                self._arrived = copies.d2h(self._host, self._stage, after=closed)
            sealed = Sealed(
                self._host,
                closed=closed,
                stream=stream,
                arrived=self._arrived,
                summed=self._summed,
            )
        self.reset()
        return sealed, norms

    def reset(self) -> None:
        """Forget the step's gradients."""
        self._single = None
        self._arrived = None
