"""The device memory that picked experts are copied to: two slots, grown to what calls need."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ts_core.device import Event
from ts_core.engine.experts_layer import ExpertLayer, runs
from ts_core.errors import OutOfBudgetError
from ts_core.memory.ledger import Reservation
from ts_core.transfer import CopyEngine

Picks = tuple[int, ...]
SLOTS = 2


@dataclass
class ExpertStats:
    """Counters of paged experts.

    Attributes:
        calls: forwards of a layer's experts (a recomputation counts again).
        picked: experts those calls picked, added up.
        loads: times a layer's picked experts were copied, forward or backward.
        load_bytes: bytes copied.
        whole_bytes: bytes it would have been with every expert.
    """

    calls: int = 0
    picked: int = 0
    loads: int = 0
    load_bytes: int = 0
    whole_bytes: int = 0


@dataclass
class ExpertSlot:
    """One device buffer, what is in it, and whether the compute stream waits for it already."""

    buffer: Tensor | None = None
    reservation: Reservation | None = None
    layer: ExpertLayer | None = None
    picks: Picks = ()
    ready: Event | None = None
    waited: bool = False
    last_use: int = 0
    stacks: list[Tensor] = field(default_factory=list)

    def holds(self, layer: ExpertLayer, picks: Picks) -> bool:
        """Whether it has exactly these experts."""
        return self.layer is layer and self.picks == picks

    def forget(self) -> None:
        """What it holds is stale."""
        self.layer, self.picks, self.ready, self.stacks = None, (), None, []


def rows_for(picks: Picks) -> int:
    """Rows of the compact stack for `picks`.

    At least two: a stack of one is a special case for some products and histograms. A row nobody
    picked is never read, and has no defined values.
    """
    return max(2, len(picks))


class ExpertSlots:
    """Copies picked experts into slots and finds them there.

    A slot is written only behind everything queued so far on the compute stream, and read only
    behind its copies.

    Args:
        copies: the engine whose host-to-device stream carries them.
        layers: all layers with paged experts.
    """

    def __init__(self, copies: CopyEngine, layers: list[ExpertLayer]) -> None:
        self.copies = copies
        self.stats = ExpertStats()
        self.slots = [ExpertSlot() for _ in range(SLOTS)]
        self._largest = max(layer.layout(max(2, layer.count))[1] for layer in layers)
        self._clock = 0

    @property
    def size_bytes(self) -> int:
        """Device bytes held."""
        return sum(0 if slot.buffer is None else slot.buffer.numel() for slot in self.slots)

    def slot_of(self, tensor: Tensor) -> ExpertSlot | None:
        """The slot whose memory `tensor` views, if any."""
        address = tensor.untyped_storage().data_ptr()
        for slot in self.slots:
            if slot.buffer is not None and slot.buffer.untyped_storage().data_ptr() == address:
                return slot
        return None

    def ready(self, layer: ExpertLayer, picks: Picks) -> ExpertSlot:
        """The slot with these experts, loaded if need be, the compute stream waiting for it."""
        slot = self.load(layer, picks)
        self._clock += 1
        slot.last_use = self._clock
        if not slot.waited:
            if slot.ready is not None:
                self.copies.wait_compute(slot.ready)
            slot.waited = True
        return slot

    def prefetch(self, layer: ExpertLayer, picks: Picks, keep: ExpertSlot) -> None:
        """Begin copying these experts into a slot other than `keep`, if the device has room."""
        if any(slot.holds(layer, picks) for slot in self.slots):
            return
        slot = self._oldest(keep)
        try:
            buffer = self._room(slot, layer.layout(rows_for(picks))[1])
        except OutOfBudgetError:
            return  # they are copied when they are needed, to the slot that is free then
        self._fill(slot, buffer, layer, picks)

    def load(self, layer: ExpertLayer, picks: Picks) -> ExpertSlot:
        """Begin copying these experts, if no slot has them.

        Raises:
            OutOfBudgetError: the device cannot hold them, alone either.
        """
        for slot in self.slots:
            if slot.holds(layer, picks):
                return slot
        slot = self._oldest(None)
        size = layer.layout(rows_for(picks))[1]
        try:
            buffer = self._room(slot, size)
        except OutOfBudgetError:
            for other in self.slots:
                self._give_back(other)
            buffer = self._room(slot, size)
        self._fill(slot, buffer, layer, picks)
        return slot

    def _oldest(self, keep: ExpertSlot | None) -> ExpertSlot:
        slot = min(
            (slot for slot in self.slots if slot is not keep), key=lambda slot: slot.last_use
        )
        slot.forget()
        return slot

    def _fill(self, slot: ExpertSlot, buffer: Tensor, layer: ExpertLayer, picks: Picks) -> None:
        count = rows_for(picks)
        offsets, _ = layer.layout(count)
        stretches = runs(picks)
        pieces: list[tuple[int, int, int]] = []
        for start, part in zip(offsets, layer.parts, strict=True):
            row, at = part.size_bytes, part.placement.offset
            if not part.by_expert:
                pieces.append((start, at, row))
            else:
                pieces += [(start + k * row, at + e * row, n * row) for k, e, n in stretches]
        last = None
        if pieces:
            behind = self.copies.record_compute()
            last = self.copies.h2d_pieces(buffer, layer.image.buffer_h, pieces, behind)
        slot.layer, slot.picks, slot.ready, slot.waited = layer, picks, last, False
        slot.stacks = layer.compact(buffer, count)
        self._clock += 1
        slot.last_use = self._clock
        self.stats.loads += 1
        self.stats.load_bytes += sum(size for _, _, size in pieces)
        self.stats.whole_bytes += sum(part.bytes_of(layer.count) for part in layer.parts)

    def drop(self, layer: ExpertLayer | None = None) -> None:
        """Forget what slots hold of `layer`, or all: the host's rows were written."""
        for slot in self.slots:
            if layer is None or slot.layer is layer:
                slot.forget()

    def close(self) -> None:
        """Give the device memory back."""
        self.copies.synchronize()
        for slot in self.slots:
            self._give_back(slot)

    def _give_back(self, slot: ExpertSlot) -> None:
        slot.forget()
        slot.buffer = None  # copies in flight keep what they write to
        if slot.reservation is not None:
            slot.reservation.release()
            slot.reservation = None

    def _room(self, slot: ExpertSlot, size: int) -> Tensor:
        """The slot's buffer, replaced by a larger one when `size` exceeds it."""
        if slot.buffer is not None and slot.buffer.numel() >= size:
            return slot.buffer
        self._give_back(slot)
        generous = max(size, min(self._largest, size + size // 8))  # calls differ
        try:
            return self._take(slot, generous)
        except OutOfBudgetError:
            return self._take(slot, size)

    def _take(self, slot: ExpertSlot, size: int) -> Tensor:
        device = self.copies.device
        slot.reservation = device.pool.reserve(size, "experts")
        try:
            with torch.inference_mode(False):
                slot.buffer = device.allocate(size)
        except BaseException:
            self._give_back(slot)
            raise
        return slot.buffer
