"""Which blocks of a StreamedModel are on the device: loading ahead, either way."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ts_core.device import Event
from ts_core.engine.streamed_state import BlockState
from ts_core.errors import StateError
from ts_core.transfer import CopyEngine, Slot, SlotRing

HISTORY = 4096


@dataclass(frozen=True)
class Residency:
    """One change of what is on the device.

    Attributes:
        action: "load" (its copy was queued) or "evict" (its memory goes to another block).
        block: the block concerned.
        resident: the blocks on the device, or on their way, after the change.
    """

    action: str
    block: int
    resident: tuple[int, ...]


class BlockSlots:
    """Streams whole blocks through a ring of device buffers at fixed addresses.

    A buffer is given to another block only behind an event recorded after the last computation
    that read it, on the stream that computed.

    Args:
        states: the blocks.
        copies: carries them on its host-to-device stream.
        count: buffers, at least 1.
        observer: called with each `Residency`, after it happened.

    Raises:
        OutOfBudgetError: the device cannot hold the ring.
    """

    def __init__(
        self,
        states: Sequence[BlockState],
        copies: CopyEngine,
        count: int,
        observer: Callable[[Residency], None] | None,
    ) -> None:
        self.states = states
        self.copies = copies
        self.history: deque[Residency] = deque(maxlen=HISTORY)
        self.observer = observer
        self.loads = self.load_bytes = self.demand_loads = self.peak_resident = 0
        self.ring = SlotRing(copies.device, max(state.size_bytes for state in states), count)
        self._slot_of: dict[int, Slot] = {}
        self._done: dict[int, Event] = {}
        self._bound: int | None = None
        self._clock = 0
        self._process = os.getpid()
        self._closed = False
        # Views made here are never inference tensors, whatever mode a forward runs in.
        for state in states:
            for slot in self.ring.slots:
                state.image.bind(slot.index, slot.buffer)
            state.image.bind_host()

    @property
    def resident(self) -> tuple[int, ...]:
        """The blocks on the device now, or on their way there."""
        return tuple(sorted(self._slot_of))

    def begin_pass(self) -> None:
        """Forget what is on the device: the weights may have been written to since."""
        for index in list(self._slot_of):
            self._evict(index)

    def enter(self, index: int, direction: int) -> None:
        """Bind block `index` to the device and load the next ones.

        Args:
            index: the block that is about to compute.
            direction: +1 in forward, -1 in backward.
        """
        if self._closed:
            raise StateError(
                "the StreamedModel was closed, or changed by .to(), after the forward of this "
                "backward. Finish the backward first."
            )
        if os.getpid() != self._process:
            raise StateError(
                "a StreamedModel was used in a forked child process, which has none of the "
                "parent's copy threads. Use it in the parent, or start workers with 'spawn'."
            )
        if self._bound is not None:
            raise StateError(
                f"block {index} was asked for while block {self._bound} computes: a StreamedModel "
                f"runs one pass at a time. Do not call it from inside its own blocks, or from two "
                f"threads at once."
            )
        room = len(self.ring.slots) - 1
        ahead = list(range(index + direction, len(self.states) if direction > 0 else -1, direction))
        keep = {index, *ahead[:room]}
        slot = self._slot_of.get(index)
        if slot is None:
            self.demand_loads += 1
            slot = self._load(index, keep)
        if not slot.waited:
            assert slot.ready is not None
            self.copies.wait_compute(slot.ready)
            slot.waited = True
        self._touch(slot)
        self.states[index].image.bind(slot.index, slot.buffer)
        self._bound = index
        try:
            for other in ahead[:room]:
                if other not in self._slot_of:
                    self._load(other, keep)
        except BaseException:
            self.leave(index)
            raise

    def leave(self, index: int) -> None:
        """Bind block `index` to host memory again, behind everything queued that reads it."""
        if self._bound != index:
            return
        slot = self._slot_of.get(index)
        if slot is not None:
            self._done[slot.index] = self.copies.record_compute()
        self.states[index].image.bind_host()
        self._bound = None

    def drop(self, index: int) -> None:
        """Forget the device copy of a block that wrote to its own state."""
        if index in self._slot_of:
            self._evict(index)

    def close(self) -> None:
        """Free the ring; every copy has finished before."""
        self._closed = True
        self.copies.synchronize()
        self.copies.device.compute_stream().synchronize()
        if self._bound is not None:
            self.leave(self._bound)
        self.begin_pass()
        for state in self.states:
            state.image.forget_views()
            state.image.bind_host()
        self.ring.close()

    def _load(self, index: int, keep: set[int]) -> Slot:
        slot = self._free_slot(keep)
        state = self.states[index]
        size = state.size_bytes
        after = self._done.get(slot.index)
        slot.ready = self.copies.h2d(slot.buffer[:size], state.image.buffer_h, after=after)
        slot.waited = False
        self._touch(slot)
        self._slot_of[index] = slot
        self._done.pop(slot.index, None)  # (Ctrl-C before this line leaves it to the next load)
        self.loads += 1
        self.load_bytes += size
        self.peak_resident = max(self.peak_resident, len(self._slot_of))
        self._note("load", index)
        return slot

    def _free_slot(self, keep: set[int]) -> Slot:
        owners = {slot.index: index for index, slot in self._slot_of.items()}
        free = [slot for slot in self.ring.slots if owners.get(slot.index) not in keep]
        slot = min(free, key=lambda slot: (slot.index in owners, slot.last_use))
        if slot.index in owners:
            self._evict(owners[slot.index])
        return slot

    def _evict(self, index: int) -> None:
        slot = self._slot_of.pop(index)
        if not slot.waited and slot.ready is not None:
            # Its copy may still be on its way; the next one follows it on the same stream.
            slot.ready = None
        self._note("evict", index)

    def _touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.last_use = self._clock

    def _note(self, action: str, index: int) -> None:
        change = Residency(action, index, self.resident)
        self.history.append(change)
        if self.observer is not None:
            self.observer(change)
